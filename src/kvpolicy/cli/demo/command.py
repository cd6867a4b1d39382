"""``kvpolicy demo``: one long text through a bounded session, beside the same stream on stock vLLM."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING

from attrs import frozen

from kvpolicy.bench.machine import environment_facts
from kvpolicy.bench.models.smollm import demo_model
from kvpolicy.bench.processes.parent import require_engine
from kvpolicy.bench.streams.figures import describe_end, verdict
from kvpolicy.bench.streams.records import EngineKind
from kvpolicy.bench.streams.report import write_report
from kvpolicy.bench.streams.run import run_stream
from kvpolicy.bench.streams.text import read_text
from kvpolicy.cli.demo.plot import plot_runs
from kvpolicy.cli.demo.terminal import TITLES, summary_table, view_for
from kvpolicy.core.errors import MissingExtraError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from kvpolicy.bench.streams.records import Run, StreamSettings

ROWS_FILE = "rows.json"


@frozen(kw_only=True)
class DemoOptions:
    """What the demo does with the two runs. ``text`` None: the text that comes with kvpolicy."""

    settings: StreamSettings
    output: Path
    text: Path | None = None
    json: Path | None = None
    skip_stock: bool = False


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run the demo and return its exit status: 1 if our session died or ever held more than its budget.

    Raises:
        PolicyUsageError: the text cannot be read.
    """
    text = read_text(options.text)
    options.output.mkdir(parents=True, exist_ok=True)
    _explain(console, options.settings)
    runs = [_run(console, EngineKind.BOUNDED, options, text)]
    if not options.skip_stock:
        runs.append(_run(console, EngineKind.STOCK, options, text))
    return _conclude(console, options, runs)


def demo_folder(model: str | None, console: Console) -> str:
    """Return the model to run: the one asked for, else the demo model, unpacked first if need be.

    Raises:
        MissingExtraError: vLLM or matplotlib is not installed.
        PolicyUsageError: the demo model cannot be made; the error says what to install.
    """
    require_engine()
    if find_spec("matplotlib") is None:
        raise MissingExtraError(extra="cli", module="matplotlib")
    return model or str(demo_model(progress=lambda line: console.print(line, highlight=False)))


def _explain(console: Console, settings: StreamSettings) -> None:
    console.print(
        f"{settings.num_chunks} chunks of at most {settings.chunk_tokens} tokens, replies of at most "
        f"{settings.reply_tokens}; the session may hold {settings.budget} tokens, "
        f"the engine's context limit is {settings.context}.",
        highlight=False,
    )


def _run(console: Console, kind: EngineKind, options: DemoOptions, text: str) -> Run:
    log = options.output / f"{kind.value}-engine.log"
    with view_for(console, kind, options.settings) as view:
        run = run_stream(kind, options.settings, text, log=log, listener=view)
    console.print()
    return run


def _conclude(console: Console, options: DemoOptions, runs: list[Run]) -> int:
    ours, stock = runs[0], runs[1] if len(runs) > 1 else None
    facts = environment_facts(datetime.now(UTC))
    reports = [options.output / ROWS_FILE, *([options.json] if options.json else [])]
    for path in reports:
        write_report(path, runs, facts)
    plots = plot_runs(ours, stock, options.output)
    console.print(summary_table(ours, stock))
    if stock is not None:
        console.print(f"{TITLES[stock.kind]}: {describe_end(stock)}", highlight=False, markup=False, soft_wrap=True)
    logs = [options.output / f"{run.kind.value}-engine.log" for run in runs]
    console.print(
        "Written: " + ", ".join(str(path) for path in (*plots, *reports, *logs)), highlight=False, soft_wrap=True
    )
    failures = verdict(ours)
    for failure in failures:
        console.print(f"{TITLES[ours.kind]}: {failure}", style="bold red", markup=False, soft_wrap=True)
    return 1 if failures else 0

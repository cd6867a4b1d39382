"""How the cost of a session grows: stock vLLM against a bounded session, on the same stream.

``python -m kvpolicy.bench.streams.session_growth`` runs every scenario on both engines, one after the other, prints
the figures (with the cases that a bounded session loses) and writes them as JSON. The runs are those of
``kvpolicy demo``.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from kvpolicy.bench.machine import environment_facts
from kvpolicy.bench.models.smollm import demo_model
from kvpolicy.bench.processes.parent import require_engine
from kvpolicy.bench.streams.figures import describe_end, quantile, same_replies, summarise, verdict
from kvpolicy.bench.streams.records import EngineKind, StreamSettings
from kvpolicy.bench.streams.report import write_report
from kvpolicy.bench.streams.run import run_stream
from kvpolicy.bench.streams.text import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpolicy.bench.streams.records import ChunkRow, Run

SHARES = (0.2, 0.5, 0.8)
# The first chunk pays for first-time work in both engines.
FIRST_MEASURED = 2
KINDS = (EngineKind.STOCK, EngineKind.BOUNDED)


@frozen(kw_only=True)
class Scenario:
    """One stream for both engines, and what it is to show."""

    name: str
    shows: str
    settings: StreamSettings


def scenarios(base: StreamSettings, *, quick: bool) -> tuple[Scenario, ...]:
    """Return what is measured; ``quick`` makes all of it short."""
    return (
        Scenario(
            name="below-budget",
            shows="a session that never reaches its budget: what bookkeeping costs",
            settings=evolve(base, num_chunks=14),
        ),
        Scenario(
            name="limit-2048",
            shows="the demo's stream: stock reaches the context limit",
            settings=evolve(base, num_chunks=40 if quick else 120),
        ),
        Scenario(
            name="roomy-8192",
            shows="a context limit that stock does not reach: what bounding alone gains",
            settings=evolve(base, num_chunks=20 if quick else 100, context=8192, kv_cache_bytes=256 << 20),
        ),
        Scenario(
            name="often-consolidated",
            shows="consolidation about every 9 chunks: what it costs when it comes far too often",
            settings=evolve(base, num_chunks=40, consolidation_threshold=0.2),
        ),
    )


def main() -> int:
    """Run, print, write; 1 if a bounded session broke its promise."""
    options = _options()
    require_engine()
    # Greedy: what makes the demo's replies readable is no part of what is measured, and replies can be compared.
    model = options.model or str(demo_model(progress=_say))
    base = StreamSettings(model=model, temperature=0.0)
    text = read_text(options.text)
    options.output.mkdir(parents=True, exist_ok=True)
    facts = environment_facts(datetime.now(UTC))
    print(_headline(facts, base))
    all_runs: list[Run] = []
    failures: list[str] = []
    for scenario in scenarios(base, quick=options.quick):
        if options.only and scenario.name not in options.only:
            continue
        runs = {kind: _measure(scenario, kind, text, options.output) for kind in KINDS}
        stock, ours = runs[EngineKind.STOCK], runs[EngineKind.BOUNDED]
        print(f"\n{scenario.name}: {scenario.shows}")
        print("\n".join(f"  {line}" for line in compare(ours, stock)), flush=True)
        all_runs += [ours, stock]
        failures += [f"{scenario.name}: {failure}" for failure in verdict(ours)]
    path = options.output / "session_growth.json"
    write_report(path, all_runs, facts)
    print(f"\nWritten: {path}")
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


def compare(ours: Run, stock: Run) -> list[str]:
    """Return the figures of a scenario as lines; a ratio below 1 is a loss for the bounded session."""
    both = min(len(ours.rows), len(stock.rows))
    figures, (same, of) = summarise(ours), same_replies(ours, stock)
    lines = [
        f"stock: {describe_end(stock)}",
        f"ours:  {describe_end(ours)}",
        f"ours holds {figures.max_resident_tokens} tokens in {figures.max_blocks} blocks at most",
        f"{same} of {of} replies equal before our first eviction",
    ]
    spans = {
        f"chunks {FIRST_MEASURED}-{both} (both alive)": range(FIRST_MEASURED, both + 1),
        f"last 20 of those ({max(FIRST_MEASURED, both - 19)}-{both})": range(max(FIRST_MEASURED, both - 19), both + 1),
    }
    for name, span in spans.items():
        mine, theirs = _within(ours.rows, span), _within(stock.rows, span)
        lines += [f"{name}:", *(f"  {line}" for line in _figures(mine, theirs))]
    return lines + _own_lines(ours, both)


def _figures(mine: Sequence[ChunkRow], theirs: Sequence[ChunkRow]) -> Iterable[str]:
    rows = (
        ("TTFT", [row.ttft_s for row in mine], [row.ttft_s for row in theirs]),
        ("whole chunk", [row.total_s for row in mine], [row.total_s for row in theirs]),
    )
    for name, ours, stock in rows:
        yield f"{name:12} stock {_spread(stock)}   ours {_spread(ours)}   stock/ours {_ratio(stock, ours)}"
    rates = [
        sum(row.text_tokens + row.reply_tokens for row in rows) / sum(row.total_s for row in rows)
        for rows in (theirs, mine)
        if rows
    ]
    if len(rates) == len(KINDS):
        stock_rate, our_rate = rates
        ratio = our_rate / stock_rate
        yield f"{'throughput':12} stock {stock_rate:.1f}   ours {our_rate:.1f} tokens/s   ours/stock {ratio:.2f}"


def _own_lines(ours: Run, both: int) -> list[str]:
    """Return what only our own rows tell: after stock has ended, and the chunks that consolidate."""
    lines = []
    later = [row for row in ours.rows if row.chunk > both]
    if later:
        lines.append(f"ours alone, chunks {both + 1}-{ours.rows[-1].chunk}: TTFT {_spread([r.ttft_s for r in later])}")
    costly = [row.ttft_s for row in ours.rows if row.consolidated]
    usual = [row.ttft_s for row in ours.rows if row.num_evicted_tokens and not row.consolidated]
    if costly and usual:
        lines.append(
            f"{len(costly)} chunks with consolidation: TTFT {_spread(costly)}; evicting chunks without: "
            f"{_spread(usual)}; {_ratio(costly, usual)} times as long"
        )
    return lines


def _within(rows: Sequence[ChunkRow], span: range) -> list[ChunkRow]:
    return [row for row in rows if row.chunk in span]


def _spread(seconds: Sequence[float]) -> str:
    """Return p20/p50/p80 in milliseconds."""
    values = [quantile(seconds, share) for share in SHARES]
    return "/".join("-" if value is None else f"{1000 * value:.0f}" for value in values) + " ms"


def _ratio(over: Sequence[float], under: Sequence[float]) -> str:
    top, bottom = quantile(over, 0.5), quantile(under, 0.5)
    return f"{top / bottom:.2f}" if top is not None and bottom else "-"


class _Quiet:
    """Prints stages and a mark per ten chunks to standard error."""

    def stage(self, text: str) -> None:
        _say(f"  {text} ...")

    def row(self, row: ChunkRow) -> None:
        if row.chunk % 10 == 0:
            _say(f"  chunk {row.chunk}: {row.resident_tokens} tokens")


def _measure(scenario: Scenario, kind: EngineKind, text: str, folder: Path) -> Run:
    _say(f"{scenario.name}, {kind.value}")
    log = folder / f"{scenario.name}-{kind.value}.log"
    return run_stream(kind, scenario.settings, text, log=log, listener=_Quiet())


def _headline(facts: dict[str, object], settings: StreamSettings) -> str:
    model = Path(settings.model).name
    return (
        f"{facts['date']}  {facts['processor']}, {facts['num_cores']} cores  {facts['versions']}\n"
        f"{model}, {settings.dtype}; chunks of {settings.chunk_tokens} tokens, replies of "
        f"{settings.reply_tokens}, budget {settings.budget}, block size {settings.block_size}, eager. "
        "p20/p50/p80 throughout; stock/ours above 1: ours is faster."
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Stock vLLM against a bounded session, on the same stream.")
    parser.add_argument("--model", help="folder or Hugging Face id (default: the demo model)")
    parser.add_argument("--text", type=Path, help="text to stream (default: the one that comes with kvpolicy)")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="folder for JSON and logs")
    parser.add_argument("--quick", action="store_true", help="shorter streams")
    parser.add_argument("--only", action="append", help="a scenario's name; may be given several times")
    return parser.parse_args()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

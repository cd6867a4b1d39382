"""``kvpolicy bench decode``: engines take turns on the same prompts, pair after pair."""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvpolicy.bench.decode.cases import Case, Flags, Kind, Model
from kvpolicy.bench.decode.engines import EngineLostError, LiveEngine, live_engine
from kvpolicy.bench.decode.figures import CaseResult, Failure, PairRow, to_json
from kvpolicy.bench.decode.tables import cost_table, heading, remarks, speed_table
from kvpolicy.bench.machine import environment_facts
from kvpolicy.bench.models.kv_heavy import kv_heavy_model
from kvpolicy.bench.models.smollm import demo_model
from kvpolicy.bench.processes.parent import require_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from rich.console import Console

POLICY_KEY = "kv_cache_policy"


@frozen(kw_only=True)
class DecodeOptions:
    """What is measured, and where it goes.

    Attributes:
        cases: in this order.
        flags: each case under each of them.
        policies: the policies that a case is limited to.
        pairs: how often every engine takes its turn.
        output: folder for the engines' logs.
        json: file for the report.
        model: folder or id in place of the models of all cases.
    """

    cases: tuple[Case, ...]
    flags: tuple[Flags, ...]
    policies: tuple[Kind, ...]
    pairs: int
    output: Path
    json: Path
    model: str | None = None


def run_decode(options: DecodeOptions, console: Console) -> int:
    """Measure, print and write; return the exit status: 1 if any engine failed.

    The report is written after each case: what was measured is not lost with what comes later.
    """
    require_engine()
    options.output.mkdir(parents=True, exist_ok=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    facts = environment_facts(datetime.now(UTC))
    console.print(
        f"{facts['processor']}, {facts['num_cores']} cores; {facts['versions']}; pairs: {options.pairs}.\n"
        "Figures are medians; ratios are medians over pairs [least-greatest].",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    results: list[CaseResult] = []
    for flags in options.flags:
        for case in options.cases:
            result = _measure(case, flags, options, console)
            results.append(result)
            _show(result, console)
            report = {"environment": facts, "pairs": options.pairs, "cases": [to_json(result) for result in results]}
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"Written: {options.json}; logs of the engines: {options.output}", highlight=False, soft_wrap=True)
    return 1 if any(result.failures for result in results) else 0


def _show(result: CaseResult, console: Console) -> None:
    console.print()
    console.print(heading(result), highlight=False, markup=False, soft_wrap=True)
    console.print(speed_table(result))
    console.print(cost_table(result))
    for line in remarks(result):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _measure(case: Case, flags: Flags, options: DecodeOptions, console: Console) -> CaseResult:
    """Run one case."""
    kinds = [kind for kind in case.kinds if kind is Kind.OFF or kind in options.policies]
    turns = [Kind.STOCK, *([Kind.LIMIT] if case.has_limit else []), *kinds]
    model = options.model or _model(case.model, console)
    total = options.pairs * sum(case.workload(kind, 0).num_new_tokens for kind in turns)
    with ExitStack() as stack:
        bar = stack.enter_context(_progress(console))
        run = _CaseRun(case=case, flags=flags, bar=bar, task=bar.add_task(case.name, total=total))
        for kind in [Kind.STOCK, *kinds]:
            job = {
                "arguments": case.engine_arguments(model, flags),
                "policy": case.policy(kind),
                "extra_args": {POLICY_KEY: "off"} if kind is Kind.OFF else None,
            }
            log = options.output / f"{case.name}-{flags.value}-{kind.value}.log"
            run.start(kind, partial(_enter, stack, job, log))
        for pair in range(options.pairs):
            for kind in turns:
                run.take_turn(kind, pair, f"pair {pair + 1} of {options.pairs}")
    return run.result()


def _enter(stack: ExitStack, job: dict[str, Any], log: Path) -> LiveEngine:
    """Start an engine that ends with the stack."""
    return stack.enter_context(live_engine(job, log=log))


@define(kw_only=True)
class _CaseRun:
    """The engines of a case that still live, and what they have given."""

    case: Case
    flags: Flags
    bar: Progress
    task: Any
    _engines: dict[Kind, LiveEngine] = field(factory=dict)
    _rows: list[PairRow] = field(factory=list)
    _failures: list[Failure] = field(factory=list)
    _facts: dict[str, Any] = field(factory=dict)

    def start(self, kind: Kind, start: Callable[[], LiveEngine]) -> None:
        """Start an engine and warm it up."""
        self._say(kind, "starting")
        try:
            engine = start()
            engine.run(self.case.warm_up(), lambda _num_tokens: None)
        except EngineLostError as error:
            self._failures.append(Failure(kind=kind, pair=None, error=str(error)))
            return
        self._engines[kind] = engine
        self._facts[kind.value] = dict(engine.facts)

    def take_turn(self, kind: Kind, pair: int, name: str) -> None:
        """Run one engine once, if it still lives; all others wait."""
        workload = self.case.workload(kind, pair)
        done = self.bar.tasks[0].completed
        owner = Kind.STOCK if kind is Kind.LIMIT else kind
        engine = self._engines.get(owner)
        if engine is not None:
            self._say(kind, name)
            try:
                row = engine.run(workload, lambda made: self.bar.update(self.task, completed=done + made))
            except EngineLostError as error:
                self._failures.append(Failure(kind=kind, pair=pair, error=str(error)))
                del self._engines[owner]
            else:
                self._rows.append(PairRow(kind=kind, pair=pair, row=row))
                speed = row.decode_tokens_per_s if kind is Kind.LIMIT else row.tokens_per_s
                self.bar.console.print(
                    f"  {self.case.name} {self.flags.value}, {name}, {kind.value}: {speed or 0:.1f} tok/s, "
                    f"{row.wall_s:.1f} s",
                    highlight=False,
                )
        self.bar.update(self.task, completed=done + workload.num_new_tokens)

    def result(self) -> CaseResult:
        """Return all that was measured."""
        return CaseResult(
            case=self.case,
            flags=self.flags,
            rows=tuple(self._rows),
            failures=tuple(self._failures),
            facts=self._facts,
        )

    def _say(self, kind: Kind, what: str) -> None:
        self.bar.update(self.task, description=f"{self.case.name} {self.flags.value}: {kind.value}, {what}")


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _model(model: Model, console: Console) -> str:
    """Return the folder of a model, made first if need be."""

    def say(line: str) -> None:
        console.print(line, highlight=False)

    return str(demo_model(progress=say) if model is Model.SMOLLM else kv_heavy_model(progress=say))


def sized(cases: Iterable[Case], *, is_quick: bool) -> tuple[Case, ...]:
    """Return the cases in full or quick size."""
    return tuple(evolve(case, is_quick=is_quick) for case in cases)

"""From rows of interleaved runs to figures: medians, and ratios within pairs with an interval."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from kvpolicy.bench.decode.cases import Case, Figure, Flags, Kind, Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvpolicy.bench.decode.steps import RunRow


@frozen(kw_only=True)
class Spread:
    """The median of some values, with the least and the greatest of them."""

    median: float
    low: float
    high: float
    num: int


@frozen(kw_only=True)
class PairRow:
    """The row of one engine in one pair. Pairs are counted from 0."""

    kind: Kind
    pair: int
    row: RunRow


@frozen(kw_only=True)
class Failure:
    """A run that gave no row."""

    kind: Kind
    pair: int | None
    """None: the engine did not start."""
    error: str


@frozen(kw_only=True)
class CaseResult:
    """All that one case gave under one set of flags."""

    case: Case
    flags: Flags
    rows: tuple[PairRow, ...]
    failures: tuple[Failure, ...] = ()
    facts: Mapping[str, Any]
    """By kind: what its engine says of itself."""

    def of(self, kind: Kind) -> list[RunRow]:
        """Return the rows of one kind, in the order of pairs."""
        return [entry.row for entry in self.rows if entry.kind is kind]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that gave rows."""
        return tuple(kind for kind in Kind if self.of(kind))

    def figure(self, kind: Kind, figure: Figure) -> Spread | None:
        """Return a figure of one kind; None where there are no pairs for it."""
        ours = {entry.pair: entry.row.tokens_per_s for entry in self.rows if entry.kind is kind}
        if figure is Figure.OF_STOCK:
            theirs = {entry.pair: entry.row.tokens_per_s for entry in self.rows if entry.kind is Kind.STOCK}
        else:
            theirs = {
                entry.pair: speed
                for entry in self.rows
                if entry.kind is Kind.LIMIT and (speed := entry.row.decode_tokens_per_s) is not None
            }
        return spread(ours[pair] / theirs[pair] for pair in ours if pair in theirs)


@frozen(kw_only=True)
class KindFigures:
    """Medians over the runs of one kind. Times in ms; None: there was no such step, or no event that took any time."""

    tokens_per_s: float
    decode_tokens_per_s: float | None
    step_ms: float | None
    event_step_ms: float | None
    num_events: float
    expand_ms: float | None
    """Per event; the same below."""
    relocate_ms: float | None
    peak_blocks: int
    num_preemptions: float
    peak_memory_bytes: int
    idle_cpu_share: float | None
    """Processor time of the waiting engine, as a share of the time that it waited."""
    other_cpu_share: float | None
    """Processor time of other processes while it ran, as a share of the time that it ran; 1 is one core."""


def summarise(rows: Sequence[RunRow]) -> KindFigures:
    """Return the figures of some rows (of one, at least)."""
    with_events = [row for row in rows if row.num_events]
    return KindFigures(
        tokens_per_s=median(row.tokens_per_s for row in rows),
        decode_tokens_per_s=_median(row.decode_tokens_per_s for row in rows),
        step_ms=_median(row.step_ms for row in rows),
        event_step_ms=_median(row.event_step_ms for row in rows),
        num_events=median(row.num_events for row in rows),
        expand_ms=_median(1000 * row.expand_s / row.num_events for row in with_events),
        relocate_ms=_median(1000 * row.relocate_s / row.num_events for row in with_events),
        peak_blocks=max(row.peak_blocks for row in rows),
        num_preemptions=median(row.num_preemptions for row in rows),
        peak_memory_bytes=max(row.peak_memory_bytes for row in rows),
        # The first run waits for nothing but its order.
        idle_cpu_share=_median(row.idle_cpu_s / row.idle_s for row in rows if row.idle_s > 1),
        other_cpu_share=_median(None if row.other_cpu_s is None else row.other_cpu_s / row.wall_s for row in rows),
    )


def spread(values: Iterable[float]) -> Spread | None:
    """Return median and range of the values; None of none.

    >>> spread([1.0, 4.0, 2.0])
    Spread(median=2.0, low=1.0, high=4.0, num=3)
    """
    known = list(values)
    if not known:
        return None
    return Spread(median=median(known), low=min(known), high=max(known), num=len(known))


@frozen(kw_only=True)
class Verdict:
    """Whether a kind reached a target; ``found`` None: there is nothing to judge by."""

    kind: Kind
    target: Target
    found: float | None

    @property
    def is_reached(self) -> bool:
        """Whether it did."""
        return self.found is not None and self.found >= self.target.at_least


def verdicts(result: CaseResult) -> tuple[Verdict, ...]:
    """Return what each engine of ours makes of the case's targets; in quick sizes there are none."""
    if result.case.is_quick:
        return ()
    found = []
    for kind in result.kinds:
        if kind.is_ours:
            for target in result.case.targets:
                figure = result.figure(kind, target.figure)
                found.append(Verdict(kind=kind, target=target, found=None if figure is None else figure.median))
    return tuple(found)


def preempted(result: CaseResult) -> tuple[Kind, ...]:
    """Return our kinds that preempted in a case that allows none."""
    if result.case.allows_preemptions:
        return ()
    return tuple(kind for kind in result.kinds if kind.is_ours and any(row.num_preemptions for row in result.of(kind)))


def to_json(result: CaseResult) -> dict[str, Any]:
    """Return a case as JSON values: settings, figures and every row."""
    case = result.case
    figures = {}
    for kind in result.kinds:
        ratios = {figure.value: result.figure(kind, figure) for figure in Figure} if kind.is_ours else {}
        figures[kind.value] = {
            **asdict(summarise(result.of(kind))),
            **{name: asdict(value) for name, value in ratios.items() if value is not None},
        }
    return {
        "case": case.name,
        "flags": result.flags.value,
        "is_quick": case.is_quick,
        "settings": {
            "model": case.model.value,
            "num_requests": case.num_requests,
            "prompt_tokens": case.prompt_tokens,
            "new_tokens": case.asked_tokens,
            "repeats": case.repeats,
            "limit_prompt_tokens": case.limit_length if case.has_limit else None,
            "budget": case.budget,
            "buffer_size": case.buffer_size,
            "block_size": case.block_size,
            "num_blocks": case.pool,
        },
        "engines": dict(result.facts),
        "figures": figures,
        "verdicts": [
            {
                "kind": verdict.kind.value,
                "figure": verdict.target.figure.value,
                "at_least": verdict.target.at_least,
                "found": verdict.found,
                "is_reached": verdict.is_reached,
            }
            for verdict in verdicts(result)
        ],
        "rows": [
            {
                "kind": entry.kind.value,
                "pair": entry.pair,
                "tokens_per_s": entry.row.tokens_per_s,
                "decode_tokens_per_s": entry.row.decode_tokens_per_s,
                **asdict(entry.row),
            }
            for entry in result.rows
        ],
        "failures": [
            {"kind": failure.kind.value, "pair": failure.pair, "error": failure.error} for failure in result.failures
        ],
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None

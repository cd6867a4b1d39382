"""Tables of the benchmark, and the lines under them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvpolicy.bench.decode.cases import Figure, Kind
from kvpolicy.bench.decode.figures import preempted, summarise, verdicts
from kvpolicy.bench.streams.records import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpolicy.bench.decode.figures import CaseResult, Spread

_RATIOS = ("x stock", "of the limit")
_SPEED = ("tok/s", *_RATIOS, "step ms", "event step ms")
_COST = ("events", "expand ms", "relocate ms", "peak blocks", "preempted", "peak MiB", "other CPU")
# Above this, in cores, something else was running, and the figures are not to be trusted.
BUSY_SHARE = 0.15


def heading(result: CaseResult) -> str:
    """Return the line above the tables of one case."""
    case = result.case
    size = f"{case.num_requests} x {case.asked_tokens} tokens, {case.pool} blocks of {case.block_size}"
    if case.repeats > 1:
        size = f"{case.repeats} times {size}"
    budget = f"K = {case.budget}, r = {case.buffer_size}"
    return f"{case.name}, {result.flags.value}: {case.shows} ({size}; {budget})"


def speed_table(result: CaseResult) -> Table:
    """Return how fast each engine was; the limit's tokens/s are those of its decode steps alone."""
    return _table(result, _SPEED, _speed_cells)


def cost_table(result: CaseResult) -> Table:
    """Return what each engine's run took: events of all requests, and times for one event."""
    return _table(result, _COST, _cost_cells)


def _table(result: CaseResult, columns: Sequence[str], cells: Callable[[CaseResult, Kind], tuple[str, ...]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("engine", no_wrap=True)
    for name in columns:
        # On 80 columns no interval is cut, and no word of a heading.
        table.add_column(name if name in _RATIOS else name.replace(" ", "\n"), justify="right", no_wrap=True)
    for kind in result.kinds:
        table.add_row(kind.value, *cells(result, kind))
    return table


def _speed_cells(result: CaseResult, kind: Kind) -> tuple[str, ...]:
    figures = summarise(result.of(kind))
    of_stock, of_limit = (result.figure(kind, figure) if kind.is_ours else None for figure in Figure)
    return (
        number(figures.decode_tokens_per_s if kind is Kind.LIMIT else figures.tokens_per_s, 1),
        interval(of_stock),
        interval(of_limit),
        number(figures.step_ms, 2),
        number(figures.event_step_ms, 2),
    )


def _cost_cells(result: CaseResult, kind: Kind) -> tuple[str, ...]:
    figures = summarise(result.of(kind))
    return (
        f"{figures.num_events:.0f}" if kind.is_ours else "-",
        number(figures.expand_ms, 2),
        number(figures.relocate_ms, 2),
        str(figures.peak_blocks),
        f"{figures.num_preemptions:.0f}",
        f"{figures.peak_memory_bytes / MIB:.0f}",
        "-" if figures.other_cpu_share is None else f"{figures.other_cpu_share:.0%}",
    )


def remarks(result: CaseResult) -> list[str]:
    """Return what is to be said under a table: targets, failures, and what makes the figures doubtful."""
    lines = [
        f"{verdict.kind.value}: {number(verdict.found, 3)} {verdict.target.figure.value}, "
        f"{'reached' if verdict.is_reached else 'MISSED'} (>= {verdict.target.at_least})"
        for verdict in verdicts(result)
    ]
    lines += [f"{kind.value}: MISSED (0 preemptions)" for kind in preempted(result)]
    for failure in result.failures:
        when = "at the start" if failure.pair is None else f"in pair {failure.pair + 1}"
        lines.append(f"{failure.kind.value}: FAILED {when}: {failure.error}")
    busy = [
        kind.value
        for kind in result.kinds
        if (share := summarise(result.of(kind)).other_cpu_share) is not None and share > BUSY_SHARE
    ]
    if busy:
        lines.append(f"doubtful: other processes were running beside {', '.join(busy)}")
    return lines


def interval(value: Spread | None) -> str:
    """Return a ratio with its interval.

    >>> from kvpolicy.bench.decode.figures import spread
    >>> interval(spread([1.9, 2.0, 2.125]))
    '2.00 [1.90-2.12]'
    """
    if value is None:
        return "-"
    if value.num == 1:
        return f"{value.median:.2f}"
    return f"{value.median:.2f} [{value.low:.2f}-{value.high:.2f}]"


def number(value: float | None, digits: int) -> str:
    """Return a number with so many decimals, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"

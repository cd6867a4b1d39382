"""Figures of a run: pure functions from rows to numbers."""

from __future__ import annotations

from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from attrs import frozen

from kvpolicy.bench.streams.records import ChunkRow, Outcome, Run

if TYPE_CHECKING:
    from collections.abc import Sequence

# The first chunks hold the system prompt and first-time costs; "early" begins behind them.
EARLY = range(5, 26)
NUM_LATE = 20


@frozen(kw_only=True)
class Summary:
    """Figures of one run. None: too few chunks, or not measured."""

    num_survived: int
    num_asked: int
    ttft_early_s: float | None
    ttft_late_s: float | None
    max_resident_tokens: int
    max_blocks: int
    num_evictions: int
    num_evicted_tokens: int
    num_consolidations: int
    memory_early_bytes: int | None
    memory_late_bytes: int | None


def summarise(run: Run) -> Summary:
    """Return the figures of a run: early is chunks 5 to 25, late the last 20 of them; medians both."""
    rows = run.rows
    early, late = early_rows(rows), rows[-NUM_LATE:]
    return Summary(
        num_survived=len(rows),
        num_asked=run.settings.num_chunks,
        ttft_early_s=_median([row.ttft_s for row in early]),
        ttft_late_s=_median([row.ttft_s for row in late]),
        max_resident_tokens=max((row.resident_tokens for row in rows), default=0),
        max_blocks=max((row.num_blocks for row in rows), default=0),
        num_evictions=sum(row.num_evicted_tokens > 0 for row in rows),
        num_evicted_tokens=sum(row.num_evicted_tokens for row in rows),
        num_consolidations=sum(row.consolidated for row in rows),
        memory_early_bytes=_median_bytes(early),
        memory_late_bytes=_median_bytes(late),
    )


def early_rows(rows: Sequence[ChunkRow]) -> list[ChunkRow]:
    """Return the rows of chunks 5 to 25."""
    return [row for row in rows if row.chunk in EARLY]


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that is >= ``share`` of all values; None of none.

    >>> quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.2), quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.5)
    (1.0, 3.0)
    """
    if not values:
        return None
    # Rounded first: 0.2 x 5 is one value, whatever binary fractions make of it.
    return sorted(values)[max(0, ceil(round(share * len(values), 9)) - 1)]


def same_replies(ours: Run, stock: Run) -> tuple[int, int]:
    """Return how many replies are equal, and of how many: the chunks before our first eviction.

    Until then both sessions hold the same tokens at the same positions.
    """
    first_eviction = next((row.chunk for row in ours.rows if row.num_evicted_tokens), len(ours.rows) + 1)
    pairs = [
        (mine.reply, theirs.reply)
        for mine, theirs in zip(ours.rows, stock.rows, strict=False)
        if mine.chunk < first_eviction
    ]
    return sum(mine == theirs for mine, theirs in pairs), len(pairs)


def verdict(run: Run) -> tuple[str, ...]:
    """Return what our own run failed to do; empty if it kept its promise."""
    summary, settings = summarise(run), run.settings
    failures = []
    if run.end.outcome is not Outcome.FINISHED:
        failures.append(f"the session did not survive: {describe_end(run)}")
    if summary.max_resident_tokens > settings.budget:
        failures.append(f"resident tokens exceeded the budget: {summary.max_resident_tokens} > {settings.budget}")
    return tuple(failures)


def describe_end(run: Run) -> str:
    """Return one line on how a run ended, and why."""
    why = "; the client saw ".join(part for part in (run.end.reason, run.end.error) if part)
    return f"{name_end(run)}: {why}" if why else name_end(run)


def name_end(run: Run) -> str:
    """Return a few words on how a run ended."""
    answered, asked = len(run.rows), run.settings.num_chunks
    if run.end.outcome is Outcome.FINISHED:
        return f"alive after {answered} chunks"
    return {
        Outcome.DIED: f"engine died at chunk {answered + 1}",
        Outcome.FAILED: f"ended at chunk {answered + 1} of {asked}",
        Outcome.TIMED_OUT: f"no answer to chunk {answered + 1} of {asked}",
    }[run.end.outcome]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _median_bytes(rows: Sequence[ChunkRow]) -> int | None:
    values = [row.host_memory_bytes for row in rows if row.host_memory_bytes is not None]
    return int(median(values)) if values else None

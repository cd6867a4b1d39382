"""Who goes next."""

from __future__ import annotations

import pytest
from hypothesis import given

from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.segments import Segment, SegmentKind, SegmentLog
from kvpolicy.core.spaces import TokenRange, align_inward
from kvpolicy.core.victims import Victims, oldest_victims
from tests.strategies import block_sizes, segment_logs

ANCHOR, CONTENT, REPLY = SegmentKind.ANCHOR, SegmentKind.CONTENT, SegmentKind.REPLY


def any_segment(_segment: Segment) -> bool:
    return True


def is_content(segment: Segment) -> bool:
    return segment.kind is CONTENT


def is_text(segment: Segment) -> bool:
    return segment.is_text


def log_of(*parts: tuple[SegmentKind, int], pinned: int = 1, media: tuple[int, ...] = ()) -> SegmentLog:
    """Return a log of consecutive segments; the first ``pinned`` are pinned, those in ``media`` have an image."""
    log = SegmentLog()
    for i, (kind, width) in enumerate(parts):
        log = log.append(kind, width, pinned=i < pinned, media=("image",) if i in media else ())
    return log


def test_the_oldest_segment_goes_alone_if_it_frees_a_block() -> None:
    log = log_of((ANCHOR, 10), (CONTENT, 40), (REPLY, 10))
    got = oldest_victims(log, 16, eligible=any_segment, neighbours=any_segment)
    assert got == Victims(first=1, last=2, freed=TokenRange(16, 48))
    assert got.indices == range(1, 2)


def test_short_ones_are_packed_with_those_after_them() -> None:
    log = log_of((ANCHOR, 10), (CONTENT, 10), (REPLY, 10), (CONTENT, 20), (REPLY, 50))
    got = oldest_victims(log, 16, eligible=any_segment, neighbours=any_segment)
    assert got == Victims(first=1, last=4, freed=TokenRange(16, 48))


def test_then_with_those_before_them() -> None:
    log = log_of((ANCHOR, 16), (REPLY, 10), (REPLY, 3), (CONTENT, 5), (REPLY, 2))
    got = oldest_victims(log, 16, eligible=is_content, neighbours=any_segment)
    assert got == Victims(first=1, last=5, freed=TokenRange(16, 32))
    no_reply = oldest_victims(log, 16, eligible=is_content, neighbours=is_content)
    assert no_reply is None


def test_and_otherwise_the_next_eligible_one_is_tried() -> None:
    log = log_of((ANCHOR, 16), (CONTENT, 5), (CONTENT, 20), (CONTENT, 40), media=(2,))
    got = oldest_victims(log, 16, eligible=is_text, neighbours=is_text)
    assert got == Victims(first=3, last=4, freed=TokenRange(48, 80))


def test_residue_before_a_segment_goes_with_it() -> None:
    log = SegmentLog((Segment(ANCHOR, 0, 10, pinned=True), Segment(CONTENT, 30, 40)), 40)
    got = oldest_victims(log, 16, eligible=any_segment, neighbours=any_segment)
    assert got == Victims(first=1, last=2, freed=TokenRange(16, 32))


def test_there_is_none_without_a_whole_block() -> None:
    log = log_of((ANCHOR, 1), (CONTENT, 15), (REPLY, 15))
    assert oldest_victims(log, 16, eligible=any_segment, neighbours=any_segment) is None
    assert oldest_victims(SegmentLog(), 16, eligible=any_segment, neighbours=any_segment) is None


def test_a_pinned_segment_stops_the_packing_on_both_sides() -> None:
    segments = (
        Segment(CONTENT, 0, 10),
        Segment(ANCHOR, 10, 12, pinned=True),
        Segment(CONTENT, 12, 22),
        Segment(ANCHOR, 22, 24, pinned=True),
        Segment(CONTENT, 24, 34),
    )
    assert oldest_victims(SegmentLog(segments, 34), 16, eligible=any_segment, neighbours=any_segment) is None


@given(segment_logs(), block_sizes)
def test_victims_are_the_oldest_that_can_go(log: SegmentLog, block_size: int) -> None:
    """Against a slow search over all runs of unpinned segments."""
    got = oldest_victims(log, block_size, eligible=is_content, neighbours=is_text)
    runs = [
        (first, last)
        for first in range(len(log.segments))
        for last in range(first + 1, len(log.segments) + 1)
        if not align_inward(log.span_of(first, last), block_size).is_empty
        and not any(segment.pinned for segment in log.segments[first:last])
    ]

    def starts(index: int) -> list[tuple[int, int]]:
        """Return the runs that an eviction beginning at ``index`` could choose."""
        others = [
            run
            for run in runs
            if run[0] <= index < run[1] and all(is_text(log.segments[i]) for i in range(*run) if i != index)
        ]
        return others if is_content(log.segments[index]) else []

    oldest = next((index for index in range(len(log.segments)) if starts(index)), None)
    if oldest is None:
        assert got is None
        return
    forward = [run for run in starts(oldest) if run[0] == oldest]
    expected = (
        min(forward, key=lambda run: run[1]) if forward else max(starts(oldest), key=lambda run: (run[1], run[0]))
    )
    assert got is not None
    assert (got.first, got.last) == expected
    assert got.freed == align_inward(log.span_of(*expected), block_size).tokens
    assert got.freed.width >= block_size


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (-1, 1, "victims.first: expected an integer >= 0, got -1"),
        (1, 1, r"victims.last: expected an integer >= 2 \(first \+ 1\), got 1"),
    ],
)
def test_impossible_victims_are_rejected(first: int, last: int, message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        Victims(first=first, last=last, freed=TokenRange(0, 16))

"""The segment log: worked examples, and what holds for every log and eviction."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.core.errors import InvariantError, PolicyUsageError
from kvpolicy.core.segments import Segment, SegmentKind, SegmentLog
from kvpolicy.core.spaces import TokenRange
from tests.strategies import segment_logs

ANCHOR, CONTENT, REPLY = SegmentKind.ANCHOR, SegmentKind.CONTENT, SegmentKind.REPLY


def three_segments() -> SegmentLog:
    """Return the log of the worked examples: anchor [0, 10), content [10, 50), reply [50, 60)."""
    log = SegmentLog().append(ANCHOR, 10, pinned=True)
    return log.append(CONTENT, 40, media=("image",)).append(REPLY, 10)


def test_segments_are_appended_at_the_end() -> None:
    log = three_segments()
    assert [(s.kind, s.start, s.end, s.pinned, s.media) for s in log.segments] == [
        (ANCHOR, 0, 10, True, ()),
        (CONTENT, 10, 50, False, ("image",)),
        (REPLY, 50, 60, False, ()),
    ]
    assert log.num_tokens == 60


def test_appending_nothing_changes_nothing() -> None:
    log = three_segments()
    assert log.append(REPLY, 0) is log


def test_counts() -> None:
    log = SegmentLog((*three_segments().segments, Segment(CONTENT, 65, 70)), 75)
    assert log.num_pinned == 10
    assert log.num_content == 2
    assert log.num_text_tokens == 15
    assert log.num_tokens - sum(segment.width for segment in log.segments) == 10
    assert [segment.is_text for segment in log.segments] == [True, False, True, True]
    pinned = SegmentLog((Segment(CONTENT, 0, 4, pinned=True),), 4)
    assert (pinned.num_content, pinned.num_text_tokens) == (0, 0)


def test_unowned_tokens_go_with_the_segment_behind_them_and_at_the_end_with_the_last() -> None:
    log = SegmentLog((Segment(ANCHOR, 0, 10), Segment(CONTENT, 14, 40)), 45)
    assert log.extent(0) == TokenRange(0, 10)
    assert log.extent(1) == TokenRange(10, 45)
    assert log.span_of(0, 2) == TokenRange(0, 45)
    assert SegmentLog((Segment(CONTENT, 3, 5),), 9).extent(0) == TokenRange(0, 9)


def test_what_a_victim_leaves_goes_to_the_segment_after_it() -> None:
    log = three_segments().evict(range(1, 2), TokenRange(16, 48))
    assert log == SegmentLog((Segment(ANCHOR, 0, 10, pinned=True), Segment(REPLY, 10, 28)), 28)


def test_else_to_the_unpinned_segment_before_it() -> None:
    log = three_segments().append(CONTENT, 20).evict(range(3, 4), TokenRange(64, 80))
    assert log.num_tokens == 64
    assert log.segments[:2] == three_segments().segments[:2]
    assert log.segments[2:] == (Segment(REPLY, 50, 64),)


def test_else_to_nobody() -> None:
    log = three_segments().evict(range(1, 3), TokenRange(16, 48))
    assert log == SegmentLog((Segment(ANCHOR, 0, 10, pinned=True),), 28)
    assert log.num_tokens - sum(segment.width for segment in log.segments) == 18


def test_a_pinned_neighbour_takes_nothing() -> None:
    segments = (Segment(REPLY, 0, 10), Segment(CONTENT, 10, 50), Segment(ANCHOR, 50, 60, pinned=True))
    log = SegmentLog(segments, 60).evict(range(1, 2), TokenRange(16, 48))
    assert log.segments == (Segment(REPLY, 0, 18), Segment(ANCHOR, 18, 28, pinned=True))


def test_nothing_is_left_where_the_victim_is_whole_blocks() -> None:
    log = SegmentLog((Segment(CONTENT, 0, 16), Segment(REPLY, 16, 20)), 20)
    assert log.evict(range(1), TokenRange(0, 16)) == SegmentLog((Segment(REPLY, 0, 4),), 4)


def test_media_never_move_to_a_neighbour() -> None:
    after = three_segments().evict(range(1, 2), TokenRange(16, 48)).segments[1]
    assert (after.kind, after.media) == (REPLY, ())
    before = SegmentLog((Segment(REPLY, 0, 10), Segment(CONTENT, 10, 40, media=("image",))), 40)
    assert before.evict(range(1, 2), TokenRange(16, 32)).segments == (Segment(REPLY, 0, 24),)


def test_a_neighbour_keeps_its_own_media() -> None:
    log = SegmentLog((Segment(CONTENT, 0, 40), Segment(CONTENT, 40, 50, media=("image",))), 50)
    assert log.evict(range(1), TokenRange(0, 32)).segments == (Segment(CONTENT, 0, 18, media=("image",)),)


@pytest.mark.parametrize(
    ("victims", "freed", "message"),
    [
        (range(1), (0, 16), "expected unpinned segments"),
        (range(2), (16, 32), "expected unpinned segments"),
        (range(1, 1), (16, 32), "expected neighbours among 3 segments"),
        (range(1, 4), (16, 32), "expected neighbours among 3 segments"),
        (range(-1, 1), (16, 32), "expected neighbours among 3 segments"),
        (range(1, 3, 2), (16, 32), "expected neighbours among 3 segments"),
        (range(1, 2), (0, 16), "freed: expected at least one token, all inside"),
        (range(1, 2), (48, 64), "freed: expected at least one token, all inside"),
        (range(1, 2), (16, 16), "freed: expected at least one token, all inside"),
    ],
)
def test_an_impossible_eviction_is_a_bug(victims: range, freed: tuple[int, int], message: str) -> None:
    log = three_segments()
    with pytest.raises(InvariantError, match=message):
        log.evict(victims, TokenRange(*freed))
    assert log == three_segments()


@given(segment_logs(), st.data())
def test_an_eviction_removes_exactly_the_freed_tokens(log: SegmentLog, data: st.DataObject) -> None:
    """Beside a list: every token is labelled with the segment that owns it."""
    runs = [
        (first, last)
        for first in range(len(log.segments))
        for last in range(first + 1, len(log.segments) + 1)
        if not any(segment.pinned for segment in log.segments[first:last])
    ]
    if not runs:
        return
    first, last = data.draw(st.sampled_from(runs))
    own = log.span_of(first, last)
    start = data.draw(st.integers(own.start, own.end - 1))
    freed = TokenRange(start, data.draw(st.integers(start + 1, own.end)))
    after = log.evict(range(first, last), freed)

    survivors = log.segments[:first] + log.segments[last:]
    assert after.num_tokens == log.num_tokens - freed.width
    assert [(s.kind, s.pinned, s.media) for s in after.segments] == [(s.kind, s.pinned, s.media) for s in survivors]
    tokens = [token for token in range(log.num_tokens) if not freed.start <= token < freed.end]
    for old, new in zip(survivors, after.segments, strict=True):
        held = set(tokens[new.start : new.end])
        assert set(range(old.start, old.end)) <= held
        # Beyond its own tokens it has only what the victims left, and what nobody owned.
        assert not any(other.start <= token < other.end for other in survivors if other is not old for token in held)
    assert after.num_pinned == log.num_pinned


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "content"}, "segment.kind: expected SegmentKind, got 'content'"),
        ({"start": -1}, "segment.start: expected an integer >= 0, got -1"),
        ({"start": 5, "end": 5}, r"segment.end: expected an integer >= 6 \(start \+ 1\), got 5"),
        ({"end": True}, r"segment.end: expected an integer >= 1 \(start \+ 1\), got True"),
        ({"pinned": 1}, "segment.pinned: expected bool, got 1"),
        ({"media": ["image"]}, r"segment.media: expected a tuple of strings, got \['image'\]"),
        ({"media": (1,)}, r"segment.media: expected a tuple of strings, got \(1,\)"),
    ],
)
def test_an_impossible_segment_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        Segment(**{"kind": CONTENT, "start": 0, "end": 9, **values})


@pytest.mark.parametrize(
    ("segments", "num_tokens", "message"),
    [
        ((), -1, "log.num_tokens: expected an integer >= 0, got -1"),
        ([], 0, r"log.segments: expected tuple, got \[\]"),
        ((Segment(CONTENT, 0, 9), Segment(REPLY, 8, 12)), 12, "expected sorted and disjoint ones"),
        ((Segment(CONTENT, 5, 9), Segment(REPLY, 0, 4)), 12, "expected sorted and disjoint ones"),
        ((Segment(CONTENT, 0, 9),), 8, r"expected all within 8 \(num_tokens\), got one up to 9"),
    ],
)
def test_an_impossible_log_is_rejected(segments: Any, num_tokens: int, message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        SegmentLog(segments, num_tokens)


def test_a_width_is_a_count() -> None:
    with pytest.raises(PolicyUsageError, match="width: expected an integer >= 0, got -1"):
        SegmentLog().append(CONTENT, -1)

"""The ledger of a session, operation by operation."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from kvpolicy.core.errors import InvariantError, PolicyUsageError
from kvpolicy.core.ledger import SessionLedger
from kvpolicy.core.positions import PositionMap
from kvpolicy.core.segments import Segment, SegmentKind, SegmentLog
from kvpolicy.core.spaces import TokenRange
from kvpolicy.core.victims import Victims

ANCHOR, CONTENT, REPLY = SegmentKind.ANCHOR, SegmentKind.CONTENT, SegmentKind.REPLY


def test_the_whole_first_chunk_is_the_anchor() -> None:
    ledger = SessionLedger.opened(20, media=("image",))
    anchor = Segment(ANCHOR, 0, 20, pinned=True, media=("image",))
    assert ledger == SessionLedger(log=SegmentLog((anchor,), 20), num_chunks=1)
    assert ledger.next_position == ledger.num_tokens == 20


def test_or_its_first_tokens_and_the_rest_is_content() -> None:
    log = SessionLedger.opened(20, anchor_tokens=4, media=("image",)).log
    assert log.segments == (Segment(ANCHOR, 0, 4, pinned=True), Segment(CONTENT, 4, 20, media=("image",)))


@pytest.mark.parametrize("anchor_tokens", [20, 21])
def test_an_anchor_is_at_most_the_first_chunk(anchor_tokens: int) -> None:
    assert SessionLedger.opened(20, anchor_tokens=anchor_tokens) == SessionLedger.opened(20)


def test_a_session_through_a_reply_an_eviction_and_another_chunk() -> None:
    ledger = SessionLedger.opened(10).appended(40, ("image",)).reply_closed(60)
    assert ledger.watermark == 59
    ledger = ledger.evicted(Victims(first=1, last=2, freed=TokenRange(16, 48)), TokenRange(16, 48))
    assert (ledger.num_tokens, ledger.next_position, ledger.watermark) == (28, 60, 59)
    assert (ledger.evicted_width, ledger.counts.num_evictions, ledger.counts.num_evicted_tokens) == (32, 1, 32)
    assert ledger.positions == PositionMap(rope_shift=32)
    ledger = ledger.appended(5)
    assert ledger.num_chunks == 3
    assert ledger.log.segments == (
        Segment(ANCHOR, 0, 10, pinned=True),
        Segment(REPLY, 10, 28),
        Segment(CONTENT, 28, 33),
    )
    # A reply of four tokens: the last one was sampled and not computed.
    ledger = ledger.reply_closed(36)
    assert ledger.log.segments[-1] == Segment(REPLY, 33, 36)
    assert (ledger.watermark, ledger.next_position) == (67, 68)


def test_a_chunk_can_be_withdrawn_before_anything_of_it_is_computed() -> None:
    before = SessionLedger.opened(10).appended(40, ("image",)).reply_closed(60)
    after = before.appended(5).withdrawn()
    assert after == before
    for nothing_to_withdraw in (SessionLedger.opened(10), SessionLedger(log=SegmentLog(), num_chunks=1)):
        with pytest.raises(InvariantError, match="log: expected an unpinned last segment up to"):
            nothing_to_withdraw.withdrawn()


def test_a_reply_of_one_token_leaves_nothing() -> None:
    ledger = SessionLedger.opened(10)
    assert ledger.reply_closed(10) == evolve(ledger, watermark=9)


def test_a_reply_cannot_take_tokens_away() -> None:
    with pytest.raises(InvariantError, match=r"keep: expected an integer >= 10 \(tokens in the ledger\), got 9"):
        SessionLedger.opened(10).reply_closed(9)


def test_positions_start_again_when_nothing_is_cached() -> None:
    evicted = SessionLedger.opened(10).appended(40).reply_closed(60)
    evicted = evicted.evicted(Victims(first=1, last=2, freed=TokenRange(16, 48)), TokenRange(16, 48))
    preempted = evicted.preempted()
    assert (preempted.evicted_width, preempted.watermark, preempted.next_position) == (0, -1, 28)
    assert preempted == evolve(evicted, evicted_width=0, watermark=-1)
    assert evicted.consolidated() == evolve(preempted, counts=evolve(preempted.counts, num_consolidations=1))
    assert evicted.parked() == evolve(preempted, counts=evolve(preempted.counts, num_parks=1))
    assert evicted.parked().parked().counts.num_parks == 2


@pytest.mark.parametrize("name", ["num_chunks", "evicted_width"])
@pytest.mark.parametrize("value", [-1, True, 1.0, None])
def test_counts_are_checked(name: str, value: Any) -> None:
    with pytest.raises(PolicyUsageError, match=rf"ledger.{name}: expected an integer >= 0, got {value!r}"):
        SessionLedger(**{"log": SegmentLog(), "num_chunks": 1, name: value})


def test_the_counts_of_a_ledger_are_of_their_own_type() -> None:
    with pytest.raises(PolicyUsageError, match=r"ledger\.counts: expected SessionCounts, got 3"):
        SessionLedger(log=SegmentLog(), num_chunks=1, counts=3)  # type: ignore[arg-type]


def test_the_watermark_is_below_the_next_position() -> None:
    with pytest.raises(PolicyUsageError, match=r"expected less than 10 \(next_position\), got 10"):
        evolve(SessionLedger.opened(10), watermark=10)
    with pytest.raises(PolicyUsageError, match=r"ledger.watermark: expected an integer >= -1, got -2"):
        evolve(SessionLedger.opened(10), watermark=-2)


@pytest.mark.parametrize(
    ("num_tokens", "anchor_tokens", "message"),
    [
        (0, None, "num_tokens: expected an integer >= 1, got 0"),
        (5, 0, "anchor_tokens: expected an integer >= 1 or None, got 0"),
    ],
)
def test_a_session_starts_with_a_token(num_tokens: int, anchor_tokens: int | None, message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        SessionLedger.opened(num_tokens, anchor_tokens=anchor_tokens)

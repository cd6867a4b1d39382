"""Folding a chunk: worked examples and the limits of each rule."""

from __future__ import annotations

import re
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.core.at_rest import plan_consolidation
from kvpolicy.core.budget import RetentionBudget, SessionLimits
from kvpolicy.core.errors import InvariantError, PolicyUsageError
from kvpolicy.core.fold import (
    Append,
    ChunkShape,
    Consolidate,
    DropTail,
    Evict,
    FoldPlan,
    Refuse,
    dense_refusal,
    plan_fold,
)
from kvpolicy.core.ledger import SessionLedger
from kvpolicy.core.segments import Segment, SegmentKind, SegmentLog
from kvpolicy.core.spaces import TokenRange
from kvpolicy.core.victims import Victims

LIMITS = SessionLimits(block_size=16, context_limit=8192, trained_range=8192, num_pool_blocks=1000)
BUDGET = RetentionBudget(total_tokens=1024)
CHUNK = ChunkShape(50, 24)


def session() -> SessionLedger:
    """Return the session of the worked example: anchor [0, 100), content [100, 700), reply [700, 1000)."""
    return SessionLedger.opened(100).appended(600).reply_closed(1000)


def fold(
    ledger: SessionLedger,
    chunk: ChunkShape = CHUNK,
    *,
    budget: RetentionBudget | None = BUDGET,
    limits: SessionLimits = LIMITS,
    num_computed: int | None = None,
    resident: bool = True,
) -> FoldPlan:
    computed = ledger.num_tokens if num_computed is None else num_computed
    return plan_fold(ledger, chunk, budget=budget, limits=limits, num_computed=computed, resident=resident)


def evict(first: int, last: int, start: int, end: int) -> Evict:
    return Evict(Victims(first=first, last=last, freed=TokenRange(start, end)))


def test_the_worked_example() -> None:
    plan = fold(session())
    assert plan.steps == (DropTail(1000), evict(1, 2, 112, 688), Append(50))
    assert plan.num_evicted_tokens == 576
    assert not plan.consolidates
    assert plan.refusal is None
    ledger = plan.ledger
    assert ledger.num_tokens + CHUNK.max_tokens == 424 + 74
    assert [(s.kind.value, s.start, s.end) for s in ledger.log.segments] == [
        ("anchor", 0, 100),
        ("reply", 100, 424),
        ("content", 424, 474),
    ]
    assert (ledger.evicted_width, ledger.next_position, ledger.num_chunks) == (576, 1050, 3)


@pytest.mark.parametrize(("num_tokens", "num_evictions"), [(1, 0), (950 - 24 - 600 - 226, 0), (101, 1)])
def test_under_budget_nothing_changes(num_tokens: int, num_evictions: int) -> None:
    """900 resident tokens, a chunk of up to 100 and a reply of 24 are 1024."""
    ledger = SessionLedger.opened(100).appended(500).reply_closed(900)
    plan = fold(ledger, ChunkShape(num_tokens, 24))
    assert sum(isinstance(step, Evict) for step in plan.steps) == num_evictions
    if not num_evictions:
        assert plan.steps == (DropTail(900), Append(num_tokens))
        assert plan.ledger == ledger.reply_closed(900).appended(num_tokens)


def test_the_reply_becomes_a_segment_without_its_last_token() -> None:
    ledger = SessionLedger.opened(100)
    plan = fold(ledger, num_computed=107)
    assert plan.steps == (DropTail(107), Append(50))
    assert plan.ledger.log.segments[1] == Segment(SegmentKind.REPLY, 100, 107)
    assert plan.ledger.watermark == 106


def test_media_come_with_their_chunk() -> None:
    plan = fold(session(), ChunkShape(50, 24, media=("image",)))
    assert plan.steps[-1] == Append(50, ("image",))
    assert plan.ledger.log.segments[-1].media == ("image",)


# -- refusals


def refused(ledger: SessionLedger, *args: Any, **kwargs: Any) -> Refuse:
    plan = fold(ledger, *args, **kwargs)
    assert plan.refusal is not None
    assert plan.steps == (plan.refusal,)
    assert plan.ledger is ledger
    assert not plan.consolidates
    assert plan.num_evicted_tokens == 0
    return plan.refusal


@pytest.mark.parametrize("budget", [None, BUDGET])
def test_an_empty_chunk_is_refused(budget: RetentionBudget | None) -> None:
    assert refused(session(), ChunkShape(0, 24), budget=budget, num_computed=1010).code == "empty_chunk"


def test_a_chunk_that_cannot_fit_whatever_goes_is_refused() -> None:
    """100 pinned tokens, a reply of 24 and two blocks of 16 leave 868."""
    assert fold(session(), ChunkShape(868, 24)).refusal is None
    refusal = refused(session(), ChunkShape(869, 24), num_computed=1010)
    assert refusal.code == "chunk_too_long"
    for number in (
        "100 pinned",
        "869 of this chunk",
        "max_tokens 24",
        "32 for two blocks",
        "1025",
        "1024",
        "at most 868",
    ):
        assert number in refusal.message


def followed(message: str, num_tokens: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return the chunk and the longest reply that each part of a message's advice comes to, at its limit."""
    shorter = [(int(most), max_tokens) for most in re.findall(r"(?:chunk of|pin) at most (\d+) tokens", message)]
    lower = [(num_tokens, int(most)) for most in re.findall(r"lower max_tokens to (\d+)", message)]
    both = [(1, int(room) - 1) for room in re.findall(r"\((\d+) tokens together\)", message)]
    return shorter + lower + both


@given(pinned=st.integers(1, 990), num_tokens=st.integers(1, 2000), max_tokens=st.integers(1, 2000))
def test_the_advice_to_a_chunk_that_is_too_long_can_be_followed(pinned: int, num_tokens: int, max_tokens: int) -> None:
    ledger = SessionLedger.opened(pinned)
    plan = fold(ledger, ChunkShape(num_tokens, max_tokens))
    if plan.refusal is None:
        return
    ways = followed(plan.refusal.message, num_tokens, max_tokens)
    # 1024 - 32 is what pinned tokens, chunk and reply can have together.
    assert ways
    for num, longest in ways:
        assert fold(ledger, ChunkShape(num, longest)).refusal is None
        assert fold(ledger, ChunkShape(num, longest + 1)).refusal is not None
        assert fold(ledger, ChunkShape(num + 1, longest)).refusal is not None
    assert "larger retention.total_tokens" in plan.refusal.message


def test_a_chunk_beside_a_reply_that_never_fits_is_not_told_to_be_shorter() -> None:
    """100 pinned tokens and two blocks of 16 leave 892 for both."""
    assert refused(session(), ChunkShape(5, 2000)).message.endswith(
        "; lower max_tokens to 887 or open a session with a larger retention.total_tokens"
    )
    assert refused(session(), ChunkShape(900, 2000)).message.endswith(
        "; send a shorter chunk with a lower max_tokens (892 tokens together) or open a session with a larger "
        "retention.total_tokens"
    )


def test_without_retention_nothing_is_evicted_until_the_context_is_full() -> None:
    """One token of the reply has to fit: 1000 + 7191 + 1 = 8192."""
    assert fold(session(), ChunkShape(7191, 24), budget=None).steps == (DropTail(1000), Append(7191))
    refusal = refused(session(), ChunkShape(7192, 24), budget=None)
    assert refusal.code == "context_exhausted"
    assert "8193" in refusal.message
    assert "8192" in refusal.message


def test_without_retention_the_shortest_reply_that_was_asked_for_has_to_fit() -> None:
    assert fold(session(), ChunkShape(7168, 100, min_tokens=24), budget=None).refusal is None
    assert refused(session(), ChunkShape(7169, 100, min_tokens=24), budget=None).code == "context_exhausted"


def test_without_retention_a_session_has_to_fit_into_the_pool() -> None:
    """The worked example of ``dense_refusal``: a context of 512, 20 blocks of 16."""
    limits = evolve(LIMITS, context_limit=512, num_pool_blocks=20)
    assert dense_refusal(300, ChunkShape(8, 12), limits) is None
    refusal = dense_refusal(300, ChunkShape(8, 13), limits)
    assert refusal is not None
    assert refusal.code == "chunk_too_long"
    assert "would need 321 tokens" in refusal.message
    assert "at most the 320 that" in refusal.message
    for num, longest in followed(refusal.message, 8, 13):
        assert dense_refusal(300, ChunkShape(num, longest), limits) is None
        assert dense_refusal(300, ChunkShape(num, longest + 1), limits) is not None
    assert refusal.message.endswith(
        "; send a chunk of at most 7 tokens, lower max_tokens to 12 or open a session with a retention budget"
    )
    # Where the pool holds the whole context, the limit cuts the reply.
    limits = evolve(LIMITS, context_limit=512, num_pool_blocks=32)
    assert dense_refusal(300, ChunkShape(8, 1000), limits) is None
    limits = evolve(limits, num_pool_blocks=20)
    assert refused(SessionLedger.opened(300), ChunkShape(8, 13), budget=None, limits=limits).code == "chunk_too_long"


def test_a_budget_above_the_context_limit_refuses_instead_of_overrunning_it() -> None:
    """Admission does not let this through; the plan does not rely on it."""
    limits = evolve(LIMITS, context_limit=1000)
    assert refused(session(), ChunkShape(1, 22), limits=limits, budget=BUDGET).code == "context_exhausted"
    assert fold(session(), CHUNK, limits=evolve(LIMITS, context_limit=498)).refusal is None
    assert refused(session(), CHUNK, limits=evolve(LIMITS, context_limit=497)).code == "context_exhausted"


# -- the three budgets


def turns(*widths: tuple[int, int], media: tuple[str, ...] = ()) -> SessionLedger:
    """Return a session with an anchor of 16 tokens and (content, reply) pairs of these widths."""
    ledger = SessionLedger.opened(16)
    for content, reply in widths:
        ledger = ledger.appended(content, media)
        ledger = ledger.reply_closed(ledger.num_tokens + reply)
    return ledger


def test_the_newest_content_counts() -> None:
    ledger = turns((32, 16), (32, 16), (32, 16))
    budget = evolve(BUDGET, content_segments=3)
    assert fold(ledger, budget=evolve(BUDGET, content_segments=4)).steps == (DropTail(160), Append(50))
    plan = fold(ledger, budget=budget)
    assert plan.steps == (DropTail(160), evict(1, 2, 16, 48), Append(50))
    assert plan.ledger.log.num_content == 3


def test_a_reply_may_outlive_the_content_it_describes() -> None:
    plan = fold(turns((32, 16), (32, 16)), budget=evolve(BUDGET, content_segments=1))
    assert plan.steps == (DropTail(112), evict(1, 2, 16, 48), evict(2, 3, 32, 64), Append(50))
    kinds = [segment.kind.value for segment in plan.ledger.log.segments]
    assert kinds == ["anchor", "reply", "reply", "content"]


def test_too_many_tiny_contents_stay_until_they_fill_a_block() -> None:
    """Three turns of 3 tokens are below a block; six hold one."""
    budget = evolve(BUDGET, content_segments=1)
    assert fold(turns(*[(2, 1)] * 3), budget=budget).num_evicted_tokens == 0
    plan = fold(turns(*[(2, 1)] * 6), budget=budget)
    assert plan.steps == (DropTail(34), evict(1, 12, 16, 32), Append(50))


def test_text_has_its_own_budget() -> None:
    """80 text tokens and a chunk of 50; the image of 64 tokens is not counted and does not go."""
    ledger = SessionLedger.opened(16).appended(64, ("image",)).reply_closed(96).appended(48).reply_closed(160)
    assert fold(ledger, budget=evolve(BUDGET, text_tokens=130)).num_evicted_tokens == 0
    plan = fold(ledger, budget=evolve(BUDGET, text_tokens=129))
    assert plan.steps == (DropTail(160), evict(2, 3, 80, 96), Append(50))
    plan = fold(ledger, budget=evolve(BUDGET, text_tokens=113))
    assert plan.steps == (DropTail(160), evict(2, 3, 80, 96), evict(2, 3, 80, 128), Append(50))
    assert plan.ledger.log.segments[1].media == ("image",)


def test_an_image_is_no_text() -> None:
    budget = evolve(BUDGET, text_tokens=96)
    ledger = turns((32, 16), (32, 16))
    assert fold(ledger, ChunkShape(50, 24, media=("image",)), budget=budget).num_evicted_tokens == 0
    assert fold(ledger, ChunkShape(50, 24), budget=budget).num_evicted_tokens > 0


def test_a_text_budget_smaller_than_the_chunk_leaves_only_the_chunk() -> None:
    plan = fold(turns((32, 16)), ChunkShape(50, 24), budget=evolve(BUDGET, text_tokens=1))
    assert plan.refusal is None
    assert [segment.kind.value for segment in plan.ledger.log.segments] == ["anchor", "content"]


def test_the_total_counts_the_chunk_and_its_longest_reply() -> None:
    ledger = turns((400, 100), (300, 100))
    assert fold(ledger, ChunkShape(84, 24)).num_evicted_tokens == 0
    assert fold(ledger, ChunkShape(85, 24)).steps[1] == evict(1, 2, 16, 416)
    assert fold(ledger, ChunkShape(84, 25)).steps[1] == evict(1, 2, 16, 416)


def test_the_phases_come_one_after_the_other() -> None:
    """Four contents are one too many; then 988 text tokens are eight too many, and then 1028 in all four too many."""
    ledger = turns((320, 16), (320, 16), (200, 16))
    plan = fold(ledger, ChunkShape(420, 40), budget=evolve(BUDGET, content_segments=3, text_tokens=980))
    evictions = (evict(1, 2, 16, 336), evict(1, 2, 16, 32), evict(1, 2, 16, 336))
    assert plan.steps == (DropTail(904), *evictions, Append(420))


def test_sinks_and_a_window_use_the_same_mechanism() -> None:
    """Four sinks; the first chunk's rest is content like any other."""
    budget = evolve(BUDGET, anchor_tokens=4)
    ledger = SessionLedger.opened(500, anchor_tokens=4).reply_closed(520).appended(400).reply_closed(940)
    plan = fold(ledger, ChunkShape(100, 24), budget=budget)
    assert plan.steps == (DropTail(940), evict(1, 2, 16, 496), Append(100))
    assert plan.ledger.log.num_pinned == 4


def test_scattered_pinned_segments_break_the_promise_loudly() -> None:
    """The chunk fits by its sum only if the pinned tokens are the first ones, as in every ledger that was opened."""
    segments = tuple(Segment(SegmentKind.CONTENT, 20 * i, 20 * i + 1, pinned=True) for i in range(40))
    ledger = SessionLedger(log=SegmentLog(segments, 800), num_chunks=1)
    with pytest.raises(InvariantError, match=r"retention.total_tokens: \d+ tokens stay and 900 come"):
        fold(ledger, ChunkShape(890, 10))


# -- consolidation


def evicted_session() -> SessionLedger:
    """Return a session of 424 tokens after 576 were evicted: its next token has position 1000."""
    return session().evicted(Victims(first=1, last=2, freed=TokenRange(112, 688)), TokenRange(112, 688))


@pytest.mark.parametrize(("num_tokens", "consolidates"), [(176, False), (177, True)])
def test_consolidation_comes_before_the_reply_could_pass_the_threshold(num_tokens: int, *, consolidates: bool) -> None:
    """Position 1000 + 176 + 24 - 1 = 1199 may be reached, 1200 may not."""
    limits = evolve(LIMITS, trained_range=1713)
    ledger = evicted_session()
    assert BUDGET.position_limit(limits) == pytest.approx(1199.1)
    plan = fold(ledger, ChunkShape(num_tokens, 24), limits=limits)
    assert plan.consolidates is consolidates
    if consolidates:
        assert plan.steps == (DropTail(424), Consolidate(), Append(num_tokens))
        assert (plan.ledger.evicted_width, plan.ledger.counts.num_consolidations, plan.ledger.watermark) == (0, 1, -1)


def test_eviction_comes_before_consolidation() -> None:
    plan = fold(evicted_session(), ChunkShape(700, 24), limits=evolve(LIMITS, trained_range=1713))
    kinds = [type(step) for step in plan.steps]
    assert kinds == [DropTail, Evict, Consolidate, Append]


def test_a_session_without_gaps_has_nothing_to_consolidate() -> None:
    """Even beyond the threshold, where admission would not have let it come."""
    plan = fold(
        session().evicted(Victims(first=1, last=2, freed=TokenRange(112, 688)), TokenRange(112, 688)).preempted(),
        ChunkShape(50, 24),
        limits=evolve(LIMITS, trained_range=100),
    )
    assert plan.steps == (DropTail(424), Append(50))


def test_a_parked_session_is_cut_alike_and_never_consolidates() -> None:
    limits = evolve(LIMITS, trained_range=1465)
    parked = session().parked()
    plan = fold(parked, limits=limits, resident=False)
    assert plan.steps == (DropTail(1000), evict(1, 2, 112, 688), Append(50))
    assert (plan.ledger.evicted_width, plan.ledger.watermark, plan.ledger.counts.num_evicted_tokens) == (0, -1, 576)
    assert fold(session(), limits=limits).consolidates


def next_one(ledger: SessionLedger, chunk: ChunkShape, limits: SessionLimits) -> bool:
    plan = plan_consolidation(ledger, chunk, budget=BUDGET, limits=limits, num_computed=ledger.num_tokens)
    if plan is None:
        return False
    assert plan == FoldPlan((DropTail(ledger.num_tokens), Consolidate()), ledger.consolidated())
    return True


def test_idle_consolidation_looks_one_chunk_ahead() -> None:
    limits = evolve(LIMITS, trained_range=1713)
    assert not next_one(evicted_session(), ChunkShape(176, 24), limits)
    assert next_one(evicted_session(), ChunkShape(177, 24), limits)
    assert not next_one(evicted_session().consolidated(), ChunkShape(177, 24), limits)


def test_idle_consolidation_is_not_done_where_the_next_fold_consolidates_all_the_same() -> None:
    """A fold that evicts 576 tokens passes this threshold from any start: consolidating now would be for nothing."""
    limits = evolve(LIMITS, trained_range=1470)
    assert fold(session(), limits=limits).consolidates
    assert not next_one(session(), CHUNK, limits)


def test_a_chunk_that_would_be_refused_consolidates_nothing() -> None:
    assert not next_one(evicted_session(), ChunkShape(2000, 24), evolve(LIMITS, trained_range=1713))


# -- misuse


def test_a_budget_is_resolved_before_it_is_used() -> None:
    with pytest.raises(PolicyUsageError, match="call resolved"):
        fold(session(), budget=RetentionBudget())


def test_the_computed_tokens_are_at_least_those_in_the_ledger() -> None:
    with pytest.raises(InvariantError, match=r"keep: expected an integer >= 1000"):
        fold(session(), num_computed=999)


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "media", "message"),
    [
        (-1, 24, (), "chunk.num_tokens: expected an integer >= 0, got -1"),
        (True, 24, (), "chunk.num_tokens: expected an integer >= 0, got True"),
        (5, 0, (), "chunk.max_tokens: expected an integer >= 1, got 0"),
        (5, None, (), "chunk.max_tokens: expected an integer >= 1, got None"),
        (5, 24, "image", "chunk.media: expected a tuple of strings, got 'image'"),
    ],
)
def test_an_impossible_chunk_is_rejected(num_tokens: int, max_tokens: int, media: Any, message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        ChunkShape(num_tokens, max_tokens, media=media)

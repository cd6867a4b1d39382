"""Whole sessions beside a plain list of tokens (see ``model``): what never and what always happens."""

from __future__ import annotations

import random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpolicy.core.budget import RetentionBudget, SessionLimits
from kvpolicy.core.fold import ChunkShape, Evict, plan_fold
from tests.strategies import Setup, media, setups
from tests.unit.core.model import ModelSession

lengths = st.integers(1, 20)


class SessionMachine(RuleBasedStateMachine):
    """Chunks with their replies, preemptions, parking and idle consolidation in any order."""

    session: ModelSession
    last: ChunkShape

    @initialize(setup=setups())
    def open(self, setup: Setup) -> None:
        self.session = ModelSession(setup)
        self.last = ChunkShape(setup.first_chunk, setup.max_tokens)

    @rule(num_tokens=st.integers(0, 80), max_tokens=lengths, media=media, length=lengths)
    def turn(self, num_tokens: int, max_tokens: int, media: tuple[str, ...], length: int) -> None:
        self._turn(ChunkShape(num_tokens, max_tokens, media=media), length, None)

    @rule(num_tokens=st.integers(1, 40), length=lengths, preempted_at=st.integers(0, 19))
    def turn_with_a_preemption(self, num_tokens: int, length: int, preempted_at: int) -> None:
        self._turn(ChunkShape(num_tokens, self.session.setup.max_tokens), length, preempted_at)

    def _turn(self, chunk: ChunkShape, length: int, preempted_at: int | None) -> None:
        if self.session.push(chunk):
            self.last = chunk
            self.session.reply(min(length, chunk.max_tokens), preempted_at=preempted_at)

    @precondition(lambda self: self.session.resident)
    @rule()
    def park(self) -> None:
        self.session.park()

    @rule()
    def consolidate_while_idle(self) -> None:
        if self.session.consolidate_if_due(self.last):
            # Otherwise an idle session would be consolidated for ever.
            assert not self.session.consolidate_if_due(self.last)


TestSessionMachine = SessionMachine.TestCase


@given(setups(), st.lists(st.tuples(st.integers(1, 80), lengths), min_size=1, max_size=40))
def test_a_text_session_without_further_budgets_is_anchor_and_window(
    setup: Setup, turns: list[tuple[int, int]]
) -> None:
    """No older segment stays while a newer one goes, and nothing but less than two blocks of residue between."""
    budget = evolve(setup.budget, content_segments=1000, text_tokens=None)
    session = ModelSession(evolve(setup, budget=budget))
    for num_tokens, length in turns:
        if session.push(ChunkShape(num_tokens, setup.max_tokens)):
            session.reply(min(length, setup.max_tokens))
            kept = session.owners[1:]
            assert kept == list(range(kept[0], kept[0] + len(kept)))
            dead = [token for token in session.tokens[session.num_pinned :] if token.owner < kept[0]]
            assert len(dead) <= 2 * (setup.limits.block_size - 1)


@given(setups(), st.integers(0, 2**32))
def test_a_long_session_of_any_kind(setup: Setup, seed: int) -> None:
    """Fifty chunks: longer than the machine's runs get. Every check is the model's."""
    source = random.Random(seed)
    session = ModelSession(setup)
    for _ in range(50):
        chunk = ChunkShape(source.randint(1, 40), setup.max_tokens, media=source.choice([(), ("image",)]))
        if session.push(chunk):
            length = source.randint(1, setup.max_tokens)
            session.reply(length, preempted_at=source.randrange(length) if source.random() < 0.1 else None)
            session.consolidate_if_due(chunk)
        if session.resident and source.random() < 0.1:
            session.park()


@given(setups(), st.integers(1, 80))
def test_a_consolidation_is_not_needed_again_until_enough_was_evicted(setup: Setup, num_tokens: int) -> None:
    """Right after one, the distance from the total to the threshold has to be evicted first."""
    session, chunk = ModelSession(setup), ChunkShape(num_tokens, setup.max_tokens)
    slack = setup.budget.position_limit(setup.limits) - setup.budget.require_total()
    num_evicted: int | None = None
    for _ in range(30):
        plan = session.plan(chunk)
        if plan.refusal is not None:
            return
        if num_evicted is not None:
            num_evicted += plan.num_evicted_tokens
            assert not plan.consolidates or num_evicted > slack
        if plan.consolidates:
            num_evicted = 0
        assert session.push(chunk)
        session.reply(setup.max_tokens)


@given(setup=setups(), num_tokens=st.integers(0, 80), resident=st.booleans())
def test_a_plan_is_pure_and_short(*, setup: Setup, num_tokens: int, resident: bool) -> None:
    """The same arguments give the same plan; it has at most one eviction per segment."""
    session, chunk = ModelSession(setup), ChunkShape(num_tokens, setup.max_tokens)
    if not resident:
        session.park()
    before = session.ledger
    plan = session.plan(chunk)
    assert session.plan(chunk) == plan
    assert session.ledger is before
    assert sum(isinstance(step, Evict) for step in plan.steps) <= len(before.log.segments) + 1


@pytest.mark.parametrize(("block_size", "seed"), [(16, 0), (32, 1)])
def test_a_session_of_five_hundred_chunks_stays_as_small_as_one_of_a_hundred(block_size: int, seed: int) -> None:
    source = random.Random(seed)
    session = ModelSession(
        Setup(
            budget=RetentionBudget(content_segments=12, text_tokens=800, total_tokens=1024),
            limits=SessionLimits(block_size=block_size, context_limit=1500, trained_range=4096, num_pool_blocks=100),
            first_chunk=83,
            max_tokens=24,
        )
    )
    sizes = []
    for _ in range(500):
        chunk = ChunkShape(source.randint(1, 150), 24, media=source.choice([(), ("image",)]))
        assert session.push(chunk)
        sizes.append((session.ledger.num_tokens, len(session.ledger.log.segments)))
        session.reply(source.randint(1, 24))
        if source.random() < 0.02:
            session.park()
    early, late = sizes[50:100], sizes[100:]
    assert max(tokens for tokens, _ in late) <= 1024 - 24
    assert max(segments for _, segments in late) <= max(segments for _, segments in early) + 20
    assert session.ledger.counts.num_evicted_tokens > 25_000
    assert session.ledger.counts.num_consolidations > 5


def test_the_highest_position_is_bounded_over_a_long_session() -> None:
    """Without consolidation it would grow with every eviction."""
    limits = SessionLimits(block_size=16, context_limit=2000, trained_range=2000, num_pool_blocks=100)
    budget = RetentionBudget(total_tokens=1024)
    ledger = Setup(budget=budget, limits=limits, first_chunk=40, max_tokens=10).opened()
    for _ in range(300):
        plan = plan_fold(ledger, ChunkShape(60, 10), budget=budget, limits=limits, num_computed=ledger.num_tokens + 9)
        ledger = plan.ledger
        assert ledger.next_position + 10 - 1 <= 1400
    assert ledger.counts.num_evicted_tokens > 15_000
    assert 15 < ledger.counts.num_consolidations < 80

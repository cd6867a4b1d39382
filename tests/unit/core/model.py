"""A session as a plain list of tokens, each with an identity and the position it is cached at.

It follows the plans of the core literally, keeps no account of its own of segments and budgets beyond who owns what,
and checks after every fold what must always hold.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import define, field

from kvpolicy.core.at_rest import plan_consolidation, plan_park
from kvpolicy.core.fold import Append, ChunkShape, Consolidate, DropTail, Evict, FoldPlan, Park, plan_fold
from kvpolicy.core.segments import Segment, SegmentKind
from kvpolicy.core.victims import oldest_victims

if TYPE_CHECKING:
    from kvpolicy.core.ledger import SessionLedger
    from tests.strategies import Setup


@define
class Token:
    """A token; ``position`` is None while its K is not cached."""

    identity: int
    owner: int
    position: int | None = None


@define
class ModelSession:
    """The engine's side of one session."""

    setup: Setup
    ledger: SessionLedger = field(init=False)
    tokens: list[Token] = field(factory=list, init=False)
    owners: list[int] = field(factory=list, init=False)
    widths: dict[int, int] = field(factory=dict, init=False)
    resident: bool = field(default=True, init=False)
    num_tokens_ever: int = field(default=0, init=False)
    num_pinned: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.ledger = self.setup.opened()
        self.num_pinned = self.ledger.log.num_pinned
        for segment in self.ledger.log.segments:
            self._own(self._add(segment.width), segment.width)
        self._compute()
        self.reply(1)

    # -- what the engine does

    def _add(self, count: int) -> int:
        owner = len(self.widths)
        for _ in range(count):
            self.tokens.append(Token(self.num_tokens_ever, owner))
            self.num_tokens_ever += 1
        return owner

    def _own(self, owner: int, width: int) -> None:
        if width:
            self.owners.append(owner)
            self.widths[owner] = width

    def _compute(self) -> None:
        """Compute what is not cached, at the positions that the ledger says."""
        positions = self.ledger.positions
        highest = max((t.position for t in self.tokens if t.position is not None), default=-1)
        for index, token in enumerate(self.tokens):
            if token.position is None:
                token.position = positions.rope_position(index)
                assert token.position > highest, "a new token would be rotated like a cached one, or before it"
        self.resident = True

    def _forget(self) -> None:
        for token in self.tokens:
            token.position = None

    def reply(self, length: int, *, preempted_at: int | None = None) -> None:
        """Generate ``length`` tokens, all but the last computed; maybe everything is lost after some of them."""
        before = len(self.tokens)
        self._add(length)
        if preempted_at is not None and preempted_at < length:
            self._forget()
            self.ledger = self.ledger.preempted()
        last = self.tokens.pop()
        self._compute()
        self.tokens.append(last)
        assert len(self.tokens) - 1 == before + length - 1 == self.num_computed

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is computed (or, for a parked session, kept)."""
        return sum(token.position is not None for token in self.tokens) if self.resident else len(self.tokens)

    def _close_reply(self, keep: int) -> None:
        width = keep - self.ledger.num_tokens
        self._own(self.tokens[keep - 1].owner, width)
        del self.tokens[keep:]

    # -- what the core decides

    def park(self) -> None:
        """Give back all blocks."""
        plan = plan_park(self.ledger, num_computed=self.num_computed)
        assert [type(step) for step in plan.steps] == [DropTail, Park]
        self._follow_all(plan)
        self.resident = False

    def consolidate_if_due(self, chunk: ChunkShape) -> bool:
        """Consolidate ahead of time if the core says so; return whether it did."""
        if not self.resident:
            return False
        setup = self.setup
        plan = plan_consolidation(
            self.ledger, chunk, budget=setup.budget, limits=setup.limits, num_computed=self.num_computed
        )
        if plan is None:
            return False
        assert self.plan(chunk).consolidates
        assert [type(step) for step in plan.steps] == [DropTail, Consolidate]
        self._follow_all(plan, chunk)
        self._compute()
        assert not self.plan(chunk).consolidates
        return True

    def plan(self, chunk: ChunkShape) -> FoldPlan:
        """Return the core's plan for a chunk."""
        return plan_fold(
            self.ledger,
            chunk,
            budget=self.setup.budget,
            limits=self.setup.limits,
            num_computed=self.num_computed,
            resident=self.resident,
        )

    def push(self, chunk: ChunkShape) -> bool:
        """Fold a chunk and compute it; return whether it was taken in."""
        before = self.ledger
        plan = self.plan(chunk)
        if plan.refusal is not None:
            self._check_refusal(plan, chunk, before)
            return False
        self._follow_all(plan, chunk)
        self._compute()
        self._check_plan(plan, chunk, before)
        self.check(chunk)
        return True

    def _follow_all(self, plan: FoldPlan, chunk: ChunkShape | None = None) -> None:
        ledger = self.ledger
        for step in plan.steps:
            ledger = self._follow(step, ledger, chunk)
        assert ledger == plan.ledger, "the plan's own simulation differs"
        self.ledger = ledger

    def _follow(self, step: object, ledger: SessionLedger, chunk: ChunkShape | None) -> SessionLedger:
        match step:
            case DropTail(keep=keep):
                self._close_reply(keep)
                return ledger.reply_closed(keep)
            case Evict(victims=victims) if chunk is not None:
                self._check_eviction(ledger, step, chunk)
                del self.tokens[victims.freed.start : victims.freed.end]
                del self.owners[victims.first : victims.last]
                ledger = ledger.evicted(victims, victims.freed)
                return ledger if self.resident else ledger.preempted()
            case Consolidate():
                self._forget()
                return ledger.consolidated()
            case Park():
                self._forget()
                return ledger.parked()
            case Append(num_tokens=num_tokens, media=media) if chunk is not None:
                assert media == chunk.media
                self._own(self._add(num_tokens), num_tokens)
                return ledger.appended(num_tokens, media)
        raise AssertionError(step)

    # -- what must hold

    def _check_refusal(self, plan: FoldPlan, chunk: ChunkShape, before: SessionLedger) -> None:
        """A refusal is the only step, changes nothing, and is given only where the chunk cannot fit."""
        assert plan.steps == (plan.refusal,)
        assert plan.ledger is before is self.ledger
        reserve = 2 * self.setup.limits.block_size
        needed = self.num_pinned + chunk.num_tokens + chunk.max_tokens + reserve
        assert chunk.num_tokens == 0 or needed > self.setup.budget.require_total()

    def _check_eviction(self, ledger: SessionLedger, step: Evict, chunk: ChunkShape) -> None:
        """Whole blocks, at least one, never pinned ones, never without need, never the newer before the older."""
        freed, size = step.victims.freed, self.setup.limits.block_size
        assert freed.start % size == freed.end % size == 0
        assert freed.width >= size
        assert freed.end <= ledger.num_tokens
        victims = [ledger.log.segments[i] for i in step.victims.indices]
        assert victims
        assert not any(segment.pinned for segment in victims)
        assert freed.start >= self.num_pinned
        over = self.over_budget(ledger, chunk)
        assert over, "nothing is over budget"
        rules = {"content": _is_content, "text": _is_text, "total": _any}
        eligible = rules[over[0]]
        neighbours = _is_text if over[0] == "text" else _any
        passed_over = [s for s in ledger.log.segments[: step.victims.first] if not s.pinned and eligible(s)]
        for old in passed_over:
            # An older one may stay only if it cannot free a block, alone or with its neighbours.
            only = oldest_victims(ledger.log, size, eligible=lambda s, old=old: s is old, neighbours=neighbours)  # type: ignore[misc]
            assert only is None

    def over_budget(self, ledger: SessionLedger, chunk: ChunkShape) -> list[str]:
        """Return which budgets a ledger exceeds with a chunk that is not in it yet and for which something can go."""
        budget, log, size = self.setup.budget, ledger.log, self.setup.limits.block_size
        text = budget.text_tokens
        new_text = 0 if chunk.media else chunk.num_tokens
        over = {
            "content": log.num_content + 1 > budget.content_segments
            and oldest_victims(log, size, eligible=_is_content, neighbours=_any) is not None,
            "text": text is not None
            and log.num_text_tokens + new_text > text
            and oldest_victims(log, size, eligible=_is_text, neighbours=_is_text) is not None,
            "total": log.num_tokens + chunk.num_tokens + chunk.max_tokens > budget.require_total(),
        }
        return [name for name, is_over in over.items() if is_over]

    def _check_plan(self, plan: FoldPlan, chunk: ChunkShape, before: SessionLedger) -> None:
        """Nothing happens without need; what happens is enough."""
        closed = before.reply_closed(plan.steps[0].keep) if isinstance(plan.steps[0], DropTail) else before
        if not self.over_budget(closed, chunk) and not plan.consolidates:
            assert [type(step) for step in plan.steps] == [DropTail, Append]
        if plan.consolidates:
            limit = self.setup.budget.position_limit(self.setup.limits)
            highest = before.next_position + chunk.num_tokens + chunk.max_tokens + closed.num_tokens - before.num_tokens
            assert highest - 1 > limit, "consolidated without need"

    def check(self, chunk: ChunkShape) -> None:
        """Check what holds right after a chunk was folded and computed."""
        log, budget, limits = self.ledger.log, self.setup.budget, self.setup.limits
        identities = [token.identity for token in self.tokens]
        positions = [token.position for token in self.tokens if token.position is not None]
        # The anchor is complete and first; order is kept; nothing comes twice.
        assert identities[: self.num_pinned] == list(range(self.num_pinned))
        assert all(a < b for a, b in pairwise(identities))
        assert len(positions) == len(self.tokens) == log.num_tokens
        assert all(a < b for a, b in pairwise(positions))
        assert positions[-1] == self.ledger.next_position - 1
        # The newest chunk is complete, and the last segment.
        newest = self.tokens[-chunk.num_tokens :]
        assert {token.owner for token in newest} == {self.owners[-1]}
        assert (log.segments[-1].width, log.segments[-1].kind) == (chunk.num_tokens, SegmentKind.CONTENT)
        # Every segment that is not evicted is whole and holds its own tokens.
        places: dict[int, list[int]] = defaultdict(list)
        for index, token in enumerate(self.tokens):
            places[token.owner].append(index)
        for segment, owner in zip(log.segments, self.owners, strict=True):
            own = places[owner]
            assert len(own) == self.widths[owner]
            assert segment.start <= own[0]
            assert own[-1] < segment.end
        assert log.num_tokens - sum(segment.width for segment in log.segments) <= 2 * (limits.block_size - 1)
        # The reply fits: into the budget, the context and the positions.
        total, reply_end = budget.require_total(), log.num_tokens + chunk.max_tokens
        assert reply_end <= total < limits.context_limit
        assert self.ledger.evicted_width + reply_end - 1 <= budget.position_limit(limits)


def _is_content(segment: Segment) -> bool:
    return segment.kind is SegmentKind.CONTENT


def _is_text(segment: Segment) -> bool:
    return segment.is_text


def _any(_segment: Segment) -> bool:
    return True

"""How a chunk is folded into a session: the whole plan, simulated on the ledger before anything is touched.

The steps are applied one after the other; each speaks of the indices that the steps before it have left.
Carrying them out is the adapter's job, at a moment when the session is not running.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field, frozen

from kvpolicy.core.advice import fitting_advice
from kvpolicy.core.checks import integer_errors, media_errors, reject
from kvpolicy.core.errors import InvariantError
from kvpolicy.core.segments import Segment, SegmentKind, SegmentLog
from kvpolicy.core.victims import Victims, oldest_victims

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpolicy.core.budget import RetentionBudget, SessionLimits
    from kvpolicy.core.ledger import SessionLedger


@frozen
class ChunkShape:
    """The size of a chunk, of the longest and the shortest reply to it, and its media."""

    num_tokens: int
    max_tokens: int
    min_tokens: int = field(default=1, kw_only=True)
    media: tuple[str, ...] = field(default=(), kw_only=True)

    def __attrs_post_init__(self) -> None:
        reject(
            integer_errors("chunk.num_tokens", self.num_tokens, 0)
            + integer_errors("chunk.max_tokens", self.max_tokens, 1)
            + integer_errors("chunk.min_tokens", self.min_tokens, 1)
            + media_errors("chunk.media", self.media)
        )


@frozen
class DropTail:
    """Cut the tokens to the first ``keep``: the last sampled one was never computed."""

    keep: int


@frozen
class Evict:
    """Evict the victims' whole blocks and cut their tokens."""

    victims: Victims


@frozen
class Consolidate:
    """Free all blocks: the window is computed again from position 0, together with the chunk."""


@frozen
class Park:
    """Free all blocks: the tokens are computed again, from position 0, together with the next chunk."""


@frozen
class Append:
    """Append the chunk."""

    num_tokens: int
    media: tuple[str, ...] = ()


@frozen
class Refuse:
    """Take nothing in and change nothing."""

    code: str
    message: str


FoldStep = DropTail | Evict | Consolidate | Park | Append | Refuse


@frozen
class FoldPlan:
    """Steps in order, and the ledger after all of them (if every eviction frees what was planned).

    What a session does between chunks (see ``at_rest``) is planned alike, without a chunk.
    """

    steps: tuple[FoldStep, ...]
    ledger: SessionLedger

    @property
    def refusal(self) -> Refuse | None:
        """Why the chunk is refused, None if it is not; a refusal is a plan's only step."""
        return next((step for step in self.steps if isinstance(step, Refuse)), None)

    @property
    def consolidates(self) -> bool:
        """Whether the window is computed again."""
        return any(isinstance(step, Consolidate) for step in self.steps)

    @property
    def num_evicted_tokens(self) -> int:
        """Tokens that the plan evicts."""
        return sum(step.victims.freed.width for step in self.steps if isinstance(step, Evict))


def plan_fold(  # noqa: PLR0913 - what the decision depends on, all of it
    ledger: SessionLedger,
    chunk: ChunkShape,
    *,
    budget: RetentionBudget | None,
    limits: SessionLimits,
    num_computed: int,
    resident: bool = True,
) -> FoldPlan:
    """Return how to fold a chunk into a session. Pure.

    Under budget that is: drop the tail, append. Over budget, the oldest segments go in between, first while
    there are too many content segments, then while there is too much text, then while resident tokens, chunk
    and the longest reply exceed the total. Afterwards, if the highest position of the chunk and its reply
    would pass the threshold, the window is consolidated. Refused are an empty chunk ("empty_chunk"), one that
    would not fit even if everything unpinned went ("chunk_too_long"), and one that the engine's context
    cannot hold ("context_exhausted"). Without a budget see ``dense_refusal``.

    With a total of 1024, blocks of 16, an anchor of 100 tokens, content [100, 700) and a reply [700, 1000),
    all computed, a chunk of 50 with a reply of up to 24 needs 1074. The content goes: [112, 688) is freed,
    and 424 + 74 tokens remain.

    Args:
        ledger: the session before the fold; its pinned tokens are its first ones (see
            ``SessionLedger.opened``).
        chunk: what arrived.
        budget: what may be kept, with ``total_tokens`` set; None: everything, nothing is ever evicted.
        limits: the engine's.
        num_computed: tokens of the request whose KV is computed, the reply's included; at least those in the
            ledger.
        resident: whether blocks are held; False for a parked session, whose tokens are cut all the same but
            whose positions start from 0 anyway.

    Raises:
        PolicyUsageError: ``budget.total_tokens`` is not set.
        InvariantError: ``num_computed`` is below the ledger's tokens, or the budget cannot be met although
            the chunk fits.
    """
    draft = _Draft(ledger.reply_closed(num_computed), limits.block_size, resident=resident)
    draft.steps.append(DropTail(num_computed))
    refusal = _refusal(draft.ledger, chunk, budget, limits)
    if refusal is None and budget is not None:
        _evict_over_budget(draft, chunk, budget)
        refusal = _context_refusal(draft.ledger.num_tokens + chunk.num_tokens + chunk.max_tokens, limits.context_limit)
    if refusal is not None:
        return FoldPlan((refusal,), ledger)
    if budget is not None and resident and _passes_threshold(draft.ledger, chunk, budget, limits):
        draft.ledger = draft.ledger.consolidated()
        draft.steps.append(Consolidate())
    draft.steps.append(Append(chunk.num_tokens, chunk.media))
    return FoldPlan(tuple(draft.steps), draft.ledger.appended(chunk.num_tokens, chunk.media))


@define
class _Draft:
    """A plan in the making. Lives within one call."""

    ledger: SessionLedger
    block_size: int
    resident: bool = field(kw_only=True)
    steps: list[FoldStep] = field(factory=list, init=False)

    def evict_while(
        self,
        is_over: Callable[[SegmentLog], bool],
        *,
        eligible: Callable[[Segment], bool],
        neighbours: Callable[[Segment], bool],
    ) -> None:
        """Evict oldest first until the log is not over any more or nothing can go."""
        while is_over(self.ledger.log):
            victims = oldest_victims(self.ledger.log, self.block_size, eligible=eligible, neighbours=neighbours)
            if victims is None:
                return
            ledger = self.ledger.evicted(victims, victims.freed)
            # Nothing of a parked session is cached, so the hole leaves no gap between positions.
            self.ledger = ledger if self.resident else ledger.preempted()
            self.steps.append(Evict(victims))


def _evict_over_budget(draft: _Draft, chunk: ChunkShape, budget: RetentionBudget) -> None:
    """Evict until the session and the chunk are within all three budgets."""
    total, most_text = budget.require_total(), budget.text_tokens
    new_text = 0 if chunk.media else chunk.num_tokens
    new_tokens = chunk.num_tokens + chunk.max_tokens
    draft.evict_while(lambda log: log.num_content + 1 > budget.content_segments, eligible=_is_content, neighbours=_any)
    if most_text is not None:
        draft.evict_while(
            lambda log: log.num_text_tokens + new_text > most_text, eligible=_is_text, neighbours=_is_text
        )
    draft.evict_while(lambda log: log.num_tokens + new_tokens > total, eligible=_any, neighbours=_any)
    # What is left once nothing can go: the anchor and less than a block at either end of the rest. _refusal()
    # has made sure that this much fits.
    if draft.ledger.num_tokens + new_tokens > total:
        raise InvariantError(
            f"retention.total_tokens: {draft.ledger.num_tokens} tokens stay and {new_tokens} come, "
            f"expected at most {total}"
        )


def _refusal(
    ledger: SessionLedger, chunk: ChunkShape, budget: RetentionBudget | None, limits: SessionLimits
) -> Refuse | None:
    """Return why a chunk cannot be taken in whatever is evicted, None if it can."""
    if chunk.num_tokens == 0:
        return Refuse("empty_chunk", "chunk: expected at least one token, got 0")
    if budget is None:
        return dense_refusal(ledger.num_tokens, chunk, limits)
    total, pinned, reserve = budget.require_total(), ledger.log.num_pinned, 2 * limits.block_size
    needed = pinned + chunk.num_tokens + chunk.max_tokens + reserve
    if needed <= total:
        return None
    advice = fitting_advice(total - pinned - reserve, num_tokens=chunk.num_tokens, max_tokens=chunk.max_tokens)
    return Refuse(
        "chunk_too_long",
        f"chunk: {pinned} pinned tokens, {chunk.num_tokens} of this chunk, a reply of max_tokens "
        f"{chunk.max_tokens} and {reserve} for two blocks are {needed}, expected at most retention.total_tokens "
        f"{total}; {advice}",
    )


def dense_refusal(num_held: int, chunk: ChunkShape, limits: SessionLimits) -> Refuse | None:
    """Return why a session that keeps all of its ``num_held`` tokens cannot take a chunk in, None if it can.

    The context limit cuts a reply short, but not below the shortest one that was asked for. A pool that is smaller
    than the context cuts nothing: a request that does not fit into it waits for ever, and all others behind it. With
    a context of 512 and 20 blocks of 16, 300 tokens and a chunk of 8 leave room for a reply of 12.
    """
    num_tokens = num_held + chunk.num_tokens
    refusal = _context_refusal(num_tokens + chunk.min_tokens, limits.context_limit)
    pool_tokens = limits.num_pool_blocks * limits.block_size
    needed = min(num_tokens + chunk.max_tokens, limits.context_limit)
    if refusal is None and needed > pool_tokens:
        advice = fitting_advice(
            pool_tokens - num_held,
            num_tokens=chunk.num_tokens,
            max_tokens=chunk.max_tokens,
            otherwise="open a session with a retention budget",
        )
        refusal = Refuse(
            "chunk_too_long",
            f"chunk: the session would need {needed} tokens with it and a reply of max_tokens {chunk.max_tokens}, "
            f"expected at most the {pool_tokens} that the KV cache holds; {advice}",
        )
    return refusal


def _context_refusal(num_tokens: int, context_limit: int) -> Refuse | None:
    if num_tokens <= context_limit:
        return None
    return Refuse(
        "context_exhausted",
        f"chunk: the session would need {num_tokens} tokens with it and its reply, expected at most the "
        f"context limit {context_limit}; open a new session, or one with a smaller retention budget",
    )


def _passes_threshold(ledger: SessionLedger, chunk: ChunkShape, budget: RetentionBudget, limits: SessionLimits) -> bool:
    """Return whether the last token of the reply would lie beyond what the budget lets positions reach.

    A session that has evicted nothing has no gaps to close, so consolidating it would gain nothing.
    """
    highest = ledger.next_position + chunk.num_tokens + chunk.max_tokens - 1
    return ledger.evicted_width > 0 and highest > budget.position_limit(limits)


def _is_content(segment: Segment) -> bool:
    return segment.kind is SegmentKind.CONTENT


def _is_text(segment: Segment) -> bool:
    return segment.is_text


def _any(_segment: Segment) -> bool:
    return True

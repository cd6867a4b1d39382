"""What is done to a session between two chunks: its consolidation ahead of time, and its parking. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.core.fold import Consolidate, DropTail, FoldPlan, Park, plan_fold

if TYPE_CHECKING:
    from kvpolicy.core.budget import RetentionBudget, SessionLimits
    from kvpolicy.core.fold import ChunkShape
    from kvpolicy.core.ledger import SessionLedger


def plan_consolidation(
    ledger: SessionLedger,
    last_chunk: ChunkShape,
    *,
    budget: RetentionBudget,
    limits: SessionLimits,
    num_computed: int,
) -> FoldPlan | None:
    """Return how to consolidate an idle session now so that its next fold need not, None if that is not due.

    It is due if a fold of the last chunk's shape would consolidate, and would not after a consolidation now. (The
    second condition matters where a fold evicts so much that it has to consolidate whatever happened before
    it. Without it such a session would be consolidated over and over while it is idle.)

    Args:
        ledger: the session as its last fold has left it.
        last_chunk: the chunk of that fold.
        budget: what may be kept, with ``total_tokens`` set.
        limits: the engine's.
        num_computed: tokens of the request whose KV is computed, the reply's included.
    """

    def consolidates(before: SessionLedger) -> bool:
        return plan_fold(before, last_chunk, budget=budget, limits=limits, num_computed=num_computed).consolidates

    after = ledger.reply_closed(num_computed).consolidated()
    if not consolidates(ledger) or consolidates(after):
        return None
    return FoldPlan((DropTail(num_computed), Consolidate()), after)


def plan_park(ledger: SessionLedger, *, num_computed: int | None) -> FoldPlan:
    """Return how to give back the blocks of a session that is not running; its tokens stay.

    ``num_computed`` closes the reply of an idle session as a fold does. None: there is none to close, because the
    session is being consolidated or its next chunk, folded already, waits to be computed.
    """
    if num_computed is None:
        return FoldPlan((Park(),), ledger.parked())
    return FoldPlan((DropTail(num_computed), Park()), ledger.reply_closed(num_computed).parked())

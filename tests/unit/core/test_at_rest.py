"""What is done to a session between two chunks. Consolidation ahead of time is tested beside the fold that it saves."""

from __future__ import annotations

import pytest

from kvpolicy.core.at_rest import plan_park
from kvpolicy.core.errors import InvariantError
from kvpolicy.core.fold import DropTail, FoldPlan, Park
from kvpolicy.core.ledger import SessionLedger


def test_parking_an_idle_session_closes_its_reply() -> None:
    ledger = SessionLedger.opened(10).appended(40)
    assert plan_park(ledger, num_computed=60) == FoldPlan((DropTail(60), Park()), ledger.reply_closed(60).parked())


def test_parking_a_session_that_waits_to_be_computed_keeps_its_tokens_as_they_are() -> None:
    ledger = SessionLedger.opened(10).appended(40)
    plan = plan_park(ledger, num_computed=None)
    assert plan == FoldPlan((Park(),), ledger.parked())
    assert plan.ledger.log == ledger.log


def test_parking_loses_no_tokens() -> None:
    with pytest.raises(InvariantError, match=r"keep: expected an integer >= 50 \(tokens in the ledger\), got 49"):
        plan_park(SessionLedger.opened(10).appended(40), num_computed=49)

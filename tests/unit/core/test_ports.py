"""The fake keeps the port's contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.core.events import SessionPreempted
from tests.fakes.events import RecordedEvents

if TYPE_CHECKING:
    from kvpolicy.core.ports import EventSink


def test_the_fake_sink_keeps_events_in_order() -> None:
    recorded = RecordedEvents()
    sink: EventSink = recorded
    events = [SessionPreempted(request_id=name) for name in "ab"]
    for event in events:
        sink.emit(event)
    assert recorded.events == events

"""Events kept in a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpolicy.core.events import Event


class RecordedEvents:
    """Satisfies ``kvpolicy.core.ports.EventSink``."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Keep one event."""
        self.events.append(event)

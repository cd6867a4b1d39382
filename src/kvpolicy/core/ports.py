"""What sessions need from a log: implemented by adapters, and by fakes in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvpolicy.core.events import Event


class EventSink(Protocol):
    """Where events go."""

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...

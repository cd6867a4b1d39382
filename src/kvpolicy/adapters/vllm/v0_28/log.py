"""Domain events written to the log: one structlog event per domain event, named by it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import structlog

from kvpolicy.core.events import ChunkFolded, ChunkRefused, RangeEvicted, SessionFailed

if TYPE_CHECKING:
    from kvpolicy.core.events import Event

_LEVELS: dict[type[Event], int] = {
    ChunkFolded: logging.DEBUG,
    RangeEvicted: logging.DEBUG,
    ChunkRefused: logging.WARNING,
    SessionFailed: logging.ERROR,
}


class LoggedEvents:
    """Event sink that logs through the standard ``kvpolicy.sessions`` logger. Satisfies ``core.ports.EventSink``."""

    def __init__(self) -> None:
        """Wrap the logger; its level decides what is written."""
        self._log = structlog.wrap_logger(
            logging.getLogger("kvpolicy.sessions"),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.KeyValueRenderer(key_order=["event", "request_id"]),
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        )

    def emit(self, event: Event) -> None:
        """Write one event."""
        self._log.log(_LEVELS.get(type(event), logging.INFO), event.name, **event.fields())

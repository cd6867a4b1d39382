"""The log: one structlog event per domain event, named by it, and faults with their traceback."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

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


def _logger() -> Any:
    """Return the standard ``kvpolicy.sessions`` logger in structlog's style; its level decides what is written."""
    return structlog.wrap_logger(
        logging.getLogger("kvpolicy.sessions"),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event", "request_id"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )


class LoggedEvents:
    """Event sink that logs. Satisfies ``core.ports.EventSink``."""

    def __init__(self) -> None:
        """Wrap the logger."""
        self._log = _logger()

    def emit(self, event: Event) -> None:
        """Write one event."""
        self._log.log(_LEVELS.get(type(event), logging.INFO), event.name, **event.fields())


def log_fault(name: str, **fields: object) -> None:
    """Write the exception that is being handled, with its traceback."""
    _logger().exception(name, **{"request_id": None, **fields})

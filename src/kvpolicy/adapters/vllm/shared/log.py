"""The log: one structlog event per domain event, named by it, and faults with their traceback."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvpolicy.adapters.log_lines import make_logger
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
    """Return the logger ``kvpolicy.sessions``."""
    return make_logger("kvpolicy.sessions", first=("event", "request_id"))


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


def write_to_stderr(level: int = logging.INFO) -> None:
    """Let everything that kvpolicy logs in this process be written. For the start of a program of ours.

    A library leaves that to the program that uses it.
    """
    logger = logging.getLogger("kvpolicy")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False

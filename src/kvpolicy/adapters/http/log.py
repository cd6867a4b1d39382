"""The frontend's log: one structlog event per open, chunk, refusal and close; never the text of users.

Events are named and carry fields, as everywhere in kvpolicy. A session is named by the first characters of its id:
whoever knows the whole id can use the session, so it does not belong in a file.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

from kvpolicy.adapters import log_lines
from kvpolicy.core.session_ids import without_ids

SESSION_OPENED = "session.opened"
SESSION_CLOSED = "session.closed"
RELEASE_LATE = "release.overdue"
RELEASE_FAILED = "release.failed"
CHUNK_ANSWERED = "chunk.answered"
CHUNK_REFUSED = "chunk.refused"
FAULT = "request.failed"

_LOGGER = "kvpolicy.http"


def make_logger() -> Any:
    """Return the logger ``kvpolicy.http``."""
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    return log_lines.make_logger(_LOGGER, structlog.stdlib.add_log_level, stamp)


def hide_session_ids() -> None:
    """Let the access log of uvicorn show no more of an id than this log does."""
    access = logging.getLogger("uvicorn.access")
    if not any(isinstance(kept, _HidesSessionIds) for kept in access.filters):
        access.addFilter(_HidesSessionIds())


class _HidesSessionIds(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(without_ids(arg) if isinstance(arg, str) else arg for arg in record.args)
        return True

"""What a call to a server can end in. Where an error of the core fits, it is that one.

====================  =============================================================================================
raised                when
====================  =============================================================================================
PolicyUsageError      400, 413 or 422: the request is wrong; ``reasons`` says everything that is
ChunkRefusedError     400 or 413: this chunk is not taken in; the session goes on
SessionClosedError    409: the session has ended: closed, idle for too long, abandoned
SessionFailedError    409, 500 or 503: the engine or the server ended it; open a new one. 502 or 504, from a router: its
                      server does not answer
CapacityError         503: there is no room, or the server is not ready; try again later
SessionApiError       anything else: an unknown id (404), a chunk that is pending or an index that is not the next
                      one (409), a fault of the server (500), a wrong key (401)
SessionConnectionError  there was no whole answer
====================  =============================================================================================

Their texts name a session by the first characters of its id, as the server's log does: ``session.id`` is all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpolicy.core.errors import (
    CapacityError,
    ChunkRefusedError,
    KVPolicyError,
    PolicyUsageError,
    SessionClosedError,
    SessionFailedError,
)
from kvpolicy.core.session_ids import without_ids

if TYPE_CHECKING:
    from collections.abc import Callable


class SessionApiError(KVPolicyError):
    """The server has answered with an error that no class of the core stands for."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status = status
        self.code = code
        self.message = message
        super().__init__(status, code, message)

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"


class SessionConnectionError(KVPolicyError):
    """There was no answer, or only a part of one: the server cannot be reached, or it is late."""


_BY_TYPE: dict[str, Callable[[str, str, tuple[str, ...]], KVPolicyError]] = {
    "PolicyUsageError": lambda _code, _message, reasons: PolicyUsageError(reasons),
    "TooLargeError": lambda _code, _message, reasons: PolicyUsageError(reasons),
    "SessionClosedError": lambda _code, _message, reasons: SessionClosedError(reasons),
    "ChunkRefusedError": lambda code, message, _reasons: ChunkRefusedError(code, message),
    "SessionFailedError": lambda code, message, _reasons: SessionFailedError(code, message),
    "CapacityError": lambda _code, message, _reasons: CapacityError(message),
}


def error_of(status: int, body: Any) -> KVPolicyError:  # noqa: ANN401 - JSON from anywhere
    """Return the error that an answer stands for; ``body`` is its JSON, or its text if it is none."""
    match body:
        case {"error": {"message": str(message), "type": str(kind), "code": str(code), "reasons": [*reasons]}}:
            if kind in _BY_TYPE:
                return _BY_TYPE[kind](code, message, tuple(str(reason) for reason in reasons))
            return SessionApiError(status, code, message)
    # Routers like to repeat the path that they were asked for.
    return SessionApiError(status, "unknown", without_ids(str(body))[:500])

"""Why a session ends, and what the one who still waits for a reply is told."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from kvpolicy.adapters.http.errors import ApiError


class EndReason(StrEnum):
    """Why a session ended: also a label in the metrics and a word in the log."""

    CLIENT = "client"
    DISCONNECT = "disconnect"
    IDLE = "idle"
    REPLY_DEADLINE = "reply_deadline"
    NOT_ADMITTED = "not_admitted"
    FAILED = "failed"
    ENGINE = "engine"
    INTERNAL = "internal"
    SHUTDOWN = "shutdown"


# Where the server, not the session, is at fault, the pending push says so; otherwise it is a 409 like every later one.
# (A push that is itself why the session ends has been answered with its own error before.)
_PENDING_STATUS = {
    EndReason.REPLY_DEADLINE: 503,
    EndReason.ENGINE: 503,
    EndReason.SHUTDOWN: 503,
}
_FAILURES = {EndReason.FAILED, EndReason.ENGINE, EndReason.INTERNAL, EndReason.REPLY_DEADLINE, EndReason.SHUTDOWN}


@frozen
class Ending:
    """The end of a session: why, in a word and in sentences."""

    reason: EndReason
    sentences: tuple[str, ...]

    def error(self) -> ApiError:
        """Return what any later push is told."""
        return self._error(409)

    def pending_error(self) -> ApiError:
        """Return what the push is told that was pending when the session ended."""
        return self._error(_PENDING_STATUS.get(self.reason, 409))

    def _error(self, status: int) -> ApiError:
        kind = "SessionFailedError" if self.reason in _FAILURES else "SessionClosedError"
        reasons = [f"session: it has ended: {sentence}" for sentence in self.sentences]
        return ApiError(status, f"ended_{self.reason}", "\n".join(reasons), kind=kind, reasons=reasons)

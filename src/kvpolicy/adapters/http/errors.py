"""Which HTTP answer an error becomes: one JSON shape, and a status by who has to act next.

========  =========================================================================================================
status    when
========  =========================================================================================================
400       the request makes no sense to the session layer: body, image, budget, header, refused chunk
404       no such session (malformed ids look the same), or it ended longer ago than ``tombstone_s``
409       a chunk is pending, the frame index is not the next one, or the session has ended
413       the body, the image or the chunk is too large
422       a field of the JSON or of the query has the wrong type, or is unknown
500       a fault of ours
503       no room, too many bytes on their way, a deadline passed, the engine is dead, or the server starts or stops
========  =========================================================================================================
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse

from kvpolicy.adapters.http.wording import as_typed, field_reason
from kvpolicy.core.errors import (
    CapacityError,
    ChunkRefusedError,
    PolicyUsageError,
    SessionClosedError,
    SessionFailedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


_MAX_REASONS = 20
_MAX_REASON = 300
_MAX_MESSAGE = 1000


class ApiError(Exception):
    """An answer that is not the one asked for.

    ``kind`` says who acts next and is the name of an error of ``kvpolicy.core.errors`` where one fits; ``code`` is
    for programs. What a hostile request can make long is cut: the reasons after the first 20, each reason after 300
    characters, and so the message that is made of them.
    """

    def __init__(  # noqa: PLR0913 - one argument for each field of the answer
        self,
        status: int,
        code: str,
        message: str,
        *,
        kind: str,
        reasons: Iterable[str] = (),
        retry_after_s: int | None = None,
    ) -> None:
        self.status = status
        self.code = code
        self.kind = kind
        found = tuple(reasons) or (message,)
        self.reasons = tuple(_clipped(reason) for reason in found[:_MAX_REASONS])
        self.message = "\n".join(self.reasons) if message == "\n".join(found) else _clipped(message, _MAX_MESSAGE)
        if len(found) > _MAX_REASONS:
            self.message += f"\nand {len(found) - _MAX_REASONS} more"
        self.retry_after_s = retry_after_s
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """Return the JSON object that a client gets."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "code": self.code,
                "reasons": list(self.reasons),
            }
        }

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """Return the whole answer."""
        retry = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return JSONResponse(self.body(), self.status, headers={**(headers or {}), **retry})


def _clipped(text: str, limit: int = _MAX_REASON) -> str:
    """Return a text of at most ``limit`` characters, and fewer where JSON needs many bytes for each.

    >>> _clipped("abcdefgh", 5)
    'abcd…'
    """
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    while len(json.dumps(short, ensure_ascii=False).encode(errors="replace")) > 2 * limit + 2:
        short = short[: len(short) // 2] + "…"
    return short


def bad_request(code: str, reasons: str | Iterable[str]) -> ApiError:
    """Return a 400 with its reasons."""
    reasons = (reasons,) if isinstance(reasons, str) else tuple(reasons)
    return ApiError(400, code, "\n".join(reasons), kind="PolicyUsageError", reasons=reasons)


def too_large(code: str, message: str) -> ApiError:
    """Return a 413."""
    return ApiError(413, code, message, kind="TooLargeError")


def unknown_session() -> ApiError:
    """Return the 404: the same words for every id that is no session, so that nothing can be learnt from it."""
    message = "session: there is none with this id, or it ended a while ago; open one with POST /v1/streaming/sessions"
    return ApiError(404, "unknown_session", message, kind="NotFoundError")


def conflict(code: str, message: str) -> ApiError:
    """Return a 409 that leaves the session as it is."""
    return ApiError(409, code, message, kind="ConflictError")


def unavailable(code: str, message: str, *, reasons: Iterable[str] = (), retry_after_s: int | None = None) -> ApiError:
    """Return a 503."""
    return ApiError(503, code, message, kind="CapacityError", reasons=reasons, retry_after_s=retry_after_s)


def gone(code: str, message: str) -> ApiError:
    """Return the 503 of a server that will not serve sessions again: trying later does not help."""
    return ApiError(503, code, message, kind="SessionFailedError")


def internal_error(error: BaseException) -> ApiError:
    """Return the 500 of a fault of ours. Its text goes to the log only."""
    message = f"server: an unexpected {type(error).__name__}; the log has the details; please report it"
    return ApiError(500, "internal", message, kind="InvariantError")


def invalid_fields(errors: Iterable[Mapping[str, Any]], known: Sequence[str]) -> ApiError:
    """Return the 422, with a sentence for each of pydantic's errors; ``known`` are the names that could have come."""
    reasons = [field_reason(error, known) for error in errors]
    return ApiError(422, "invalid_fields", "\n".join(reasons), kind="PolicyUsageError", reasons=reasons)


def api_error(error: Exception) -> ApiError | None:  # noqa: PLR0911 - one line for each kind
    """Return the answer that an error of the core becomes, in the words of a request; None for any other."""
    match error:
        case ApiError():
            return error
        case SessionClosedError():
            return _from_core(409, "session_ended", error.reasons, kind="SessionClosedError")
        case PolicyUsageError():
            return _from_core(400, "invalid", error.reasons, kind="PolicyUsageError")
        case ChunkRefusedError():
            status = 413 if error.code == "chunk_too_long" else 400
            return _from_core(status, error.code, error.message.splitlines(), kind="ChunkRefusedError")
        case CapacityError():
            return unavailable("no_room", str(error))
        case SessionFailedError():
            return _from_core(409, error.code, error.message.splitlines(), kind="SessionFailedError")
    return None


def _from_core(status: int, code: str, reasons: Iterable[str], *, kind: str) -> ApiError:
    typed = [as_typed(reason) for reason in reasons]
    return ApiError(status, code, "\n".join(typed), kind=kind, reasons=typed)

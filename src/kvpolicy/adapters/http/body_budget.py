"""How many bytes of bodies the server reads at a time: each has a cap, and together they have one too."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvpolicy.adapters.http.bodies import announced_length
from kvpolicy.adapters.http.errors import unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastapi import Request

    from kvpolicy.adapters.http.settings import ServerSettings

_RETRY_AFTER_S = 1


class BodyBudget:
    """The bytes that all requests together may be bringing at a time."""

    def __init__(self, settings: ServerSettings) -> None:
        """Begin with none taken."""
        self._max_body_bytes = settings.max_body_bytes
        self._max_bytes = settings.inflight_bytes()
        self.num_taken = 0

    @contextmanager
    def taken_by(self, request: Request) -> Iterator[None]:
        """Take what the request announces, or the most that a body may have if it announces nothing; until the end.

        Raises:
            ApiError: 413, it announces too much; 503, too much is taken. Nothing of the body has been read then.
        """
        announced = announced_length(request, self._max_body_bytes)
        size = self._max_body_bytes if announced is None else announced
        if self.num_taken + size > self._max_bytes:
            message = (
                f"body: {self.num_taken} bytes of bodies are on their way, this one has up to {size}, and the server "
                f"reads at most {self._max_bytes} at a time; nothing was read, try again in a moment"
            )
            raise unavailable("busy", message, retry_after_s=_RETRY_AFTER_S)
        self.num_taken += size
        try:
            yield
        finally:
            self.num_taken -= size

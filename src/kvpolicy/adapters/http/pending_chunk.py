"""A chunk on its way: pieces of its reply as they come, its outcome, and who waits for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvpolicy.adapters.http.errors import ApiError
    from kvpolicy.adapters.http.schemas import FrameReply


class Flight:
    """One chunk and, once it is there, its reply. Several requests can wait for it: a client that asks again."""

    def __init__(self, index: int, digest: bytes, on_abandoned: Callable[[], None]) -> None:
        """Begin; ``on_abandoned`` is called when the last one who waits has left before the outcome."""
        self.index = index
        self.digest = digest
        self._on_abandoned = on_abandoned
        self._pieces: list[str] = []
        self._outcome: asyncio.Future[FrameReply] = asyncio.get_running_loop().create_future()
        self._news = asyncio.Event()
        self._outcome.add_done_callback(lambda _: self._news.set())
        self._num_waiting = 0

    @property
    def has_ended(self) -> bool:
        """Whether the outcome is known."""
        return self._outcome.done()

    def add(self, piece: str) -> None:
        """Take a piece of the reply's text."""
        self._pieces.append(piece)
        self._news.set()

    def answer(self, reply: FrameReply) -> None:
        """Take the whole reply, unless the outcome is known."""
        if not self._outcome.done():
            self._outcome.set_result(reply)

    def fail(self, error: ApiError) -> None:
        """Take an error for an outcome, unless that is known."""
        if not self._outcome.done():
            self._outcome.set_exception(error)
            self._outcome.exception()  # perhaps nobody waits any more: that is no fault to be logged

    def wait(self) -> Waiter:
        """Return a place for one more request that waits."""
        self._num_waiting += 1
        return Waiter(self)

    def leave(self) -> None:
        """Take one of those who wait away."""
        self._num_waiting -= 1
        if self._num_waiting == 0 and not self._outcome.done():
            self._on_abandoned()

    async def reply(self) -> FrameReply:
        """Return the reply, or raise the error, that is the outcome."""
        # Shielded: one request that is cancelled must not cancel it for the others.
        return await asyncio.shield(self._outcome)

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the pieces of the text, from the first one, until the outcome is known."""
        num_sent = 0
        while True:
            while num_sent < len(self._pieces):
                num_sent += 1
                yield self._pieces[num_sent - 1]
            if self._outcome.done():
                return
            await self._next()

    async def begun(self) -> None:
        """Wait until there is text, or the outcome; raise it, if it is an error and there is no text."""
        while not self._pieces and not self._outcome.done():
            await self._next()
        if not self._pieces:
            await self.reply()

    async def _next(self) -> None:
        # Between the caller's look and this wait nothing can happen, and whoever waits already has been woken.
        self._news.clear()
        await self._news.wait()


class Waiter:
    """One request that waits for a chunk's outcome. Leaving before it, as the last one, abandons the chunk."""

    def __init__(self, flight: Flight) -> None:
        """Wait for ``flight``. Use ``Flight.wait``, which counts."""
        self.flight = flight
        self._has_left = False

    def leave(self) -> None:
        """Wait no longer. Calling it again does nothing."""
        if not self._has_left:
            self._has_left = True
            self.flight.leave()

    def __enter__(self) -> Self:
        """Return the waiter itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self.leave()

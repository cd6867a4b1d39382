"""How a reply goes out: whole or as server-sent events, and in both cases with an eye on the client."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.responses import StreamingResponse

from kvpolicy.adapters.http.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.types import Receive, Scope, Send

    from kvpolicy.adapters.http.pending_chunk import Waiter
    from kvpolicy.adapters.http.schemas import FrameReply


_Result = TypeVar("_Result")
# Of the loop: what middleware needs to pass a disconnect on that the server has seen.
_NUM_TURNS = 20


async def whole_reply(waiter: Waiter, receive: Receive) -> FrameReply:
    """Return the reply that ``waiter`` waits for. It leaves as soon as the client does.

    Raises:
        ApiError: there is none.
    """
    async with _leaving_with_the_client(waiter, receive):
        return await waiter.flight.reply()


async def with_presence(work: Awaitable[_Result], receive: Receive) -> tuple[_Result, bool]:
    """Return what ``work`` comes to, and whether the client is still there then, as far as the server knows.

    Starlette's own question, ``Request.is_disconnected``, gets no answer through middleware that wraps ``receive``.
    """
    has_left = asyncio.Event()
    async with _watching(receive, has_left.set):
        result = await work
        for _ in range(_NUM_TURNS):
            await asyncio.sleep(0)
    return result, not has_left.is_set()


class EventStream(StreamingResponse):
    """A reply as server-sent events: its text piece by piece, then the whole; or an error.

    An error before the first piece is an ordinary answer, with its own status.
    """

    media_type = "text/event-stream"

    def __init__(self, waiter: Waiter) -> None:
        """Prepare an answer for ``waiter``."""
        # Proxies must pass the pieces on as they come.
        super().__init__(_events(waiter), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._waiter = waiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Starlette's own way notices a client that has gone only when it has something to send."""
        async with _leaving_with_the_client(self._waiter, receive):
            try:
                await self._waiter.flight.begun()
            except ApiError as error:
                echoed = {name: value for name, value in self.headers.items() if name == "x-session-id"}
                await error.response(echoed)(scope, receive, send)
                return
            try:
                await self.stream_response(send)
            except OSError:
                return  # how some servers say that the client has gone


@asynccontextmanager
async def _leaving_with_the_client(waiter: Waiter, receive: Receive) -> AsyncIterator[None]:
    """Let the waiter leave at the end of the block, or before, if the client disconnects."""
    with waiter:
        async with _watching(receive, waiter.leave):
            yield


@asynccontextmanager
async def _watching(receive: Receive, on_left: Callable[[], object]) -> AsyncIterator[None]:
    """Call ``on_left`` if the client disconnects before the end of the block."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_left()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait({watcher})


async def _events(waiter: Waiter) -> AsyncIterator[str]:
    async for piece in waiter.flight.pieces():
        yield _event({"text": piece})
    try:
        reply = await waiter.flight.reply()
    except ApiError as error:
        yield _event(error.body(), "error")
        return
    yield _event(reply.model_dump(mode="json"), "reply")


def _event(data: dict[str, Any], name: str | None = None) -> str:
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n"

"""Serve a stand-in engine: inside the test's own loop, or by a real server on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from attrs import define, frozen
from fastapi import FastAPI, Request, Response
from PIL import Image

from kvpolicy.adapters.http.frontend import SessionFrontend
from kvpolicy.adapters.http.settings import ServerSettings
from tests.fakes.session_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

SESSIONS = "/v1/streaming/sessions"
TEXT = {"Content-Type": "text/plain"}
PNG = {"Content-Type": "image/png"}
# Nothing takes this long; it ends what hangs, also on a machine that is slow or stands still for a while.
PATIENCE_S = 60.0
# A deadline that what never comes does not meet, and whatever else a test sends does by far.
SHORT_S = 0.5


@define
class Clock:
    """Time that passes when a test says so."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


@frozen
class Served:
    """A frontend in the test's own loop, and a client to it."""

    http: httpx.AsyncClient
    engine: FakeEngine
    frontend: SessionFrontend
    clock: Clock
    app: FastAPI

    async def open(self, **wanted: Any) -> str:
        """Open a session; return its path."""
        answer = await self.http.post(SESSIONS, json=wanted)
        assert answer.status_code == 201, answer.text
        return f"{SESSIONS}/{answer.json()['session_id']}"

    async def push(self, path: str, text: str, **query: Any) -> httpx.Response:
        """Push a chunk of text."""
        return await self.http.post(f"{path}/frame", content=text, headers=TEXT, params=query)


def make_app(frontend: SessionFrontend, engine: FakeEngine) -> FastAPI:
    """Return an application that starts and stops the frontend."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        frontend.start(engine)
        yield
        await frontend.stop()

    app = FastAPI(lifespan=lifespan)
    frontend.attach(app)
    return app


@contextlib.asynccontextmanager
async def served(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[Served]:
    """Serve in the running loop, without sockets."""
    engine, clock = engine or FakeEngine(), Clock()
    frontend = SessionFrontend(ServerSettings(**settings), clock=clock)
    app = make_app(frontend, engine)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http,
    ):
        yield Served(http, engine, frontend, clock, app)


@contextlib.contextmanager
def loopback(
    engine: FakeEngine,
    *,
    behind_middleware: bool = False,
    prepare: Callable[[FastAPI], None] = lambda _: None,
    **settings: Any,
) -> Iterator[str]:
    """Serve with a real server in a thread, perhaps behind middleware that wraps its channels; yield its address.

    ``prepare`` does what else shall be done to the application.
    """
    app = make_app(SessionFrontend(ServerSettings(**settings)), engine)
    prepare(app)
    if behind_middleware:

        @app.middleware("http")
        async def pass_on(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
            return await call_next(request)

    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", timeout_graceful_shutdown=2))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server does not stop"


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that another thread brings about."""
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, "it never came to hold"
        time.sleep(0.005)


async def come_true(holds: Callable[[], bool]) -> None:
    """Let the loop run until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.001)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the error in an answer, after a look at its shape."""
    body = answer.json()
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) == {"message", "type", "code", "reasons"}
    assert error["reasons"]
    assert all(isinstance(reason, str) and reason for reason in error["reasons"])
    return dict(error)


def image_bytes(width: int = 8, height: int = 6, *, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Return a small image file."""
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, kind)
    return buffer.getvalue()

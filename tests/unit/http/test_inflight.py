"""Bodies on their way: how many bytes at a time, and which ones are not read at all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.http.serving import PNG, SESSIONS, SHORT_S, TEXT, Served, come_true, error_of, image_bytes, served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx


async def _held_body(go_on: asyncio.Event) -> AsyncIterator[bytes]:
    yield b"h"
    await go_on.wait()
    yield b"i"


async def _begun(server: Served, path: str, go_on: asyncio.Event, **headers: str) -> asyncio.Task[httpx.Response]:
    """Begin a push whose body comes to its end when ``go_on`` is set."""
    before = server.frontend.bodies.num_taken
    request = server.http.post(f"{path}/frame", content=_held_body(go_on), headers={**TEXT, **headers})
    task = asyncio.create_task(request)
    await come_true(lambda: server.frontend.bodies.num_taken > before)
    return task


async def test_a_body_beyond_what_is_read_at_a_time_is_told_to_try_again() -> None:
    async with served(max_body_bytes=1000, max_inflight_bytes=1500) as server:
        paths = [await server.open(retention={"total_tokens": 1024}) for _ in range(2)]
        go_on = asyncio.Event()
        first = await _begun(server, paths[0], go_on)
        assert server.frontend.bodies.num_taken == 1000
        for request in ({"url": SESSIONS}, {"url": f"{paths[1]}/frame", "headers": TEXT}):
            refused = await server.http.post(content=_held_body(go_on), **request)
            assert (refused.status_code, error_of(refused)["code"]) == (503, "busy")
            assert refused.headers["retry-after"] == "1"
        # A short one that says so still fits.
        assert (await server.push(paths[1], "hi")).status_code == 200
        go_on.set()
        assert (await first).status_code == 200
        assert server.frontend.bodies.num_taken == 0
        assert (await server.http.post(f"{paths[1]}/frame", content=_held_body(go_on), headers=TEXT)).is_success


async def test_the_longest_body_is_taken_and_so_is_all_that_is_read_at_a_time() -> None:
    async with served(max_body_bytes=1000, max_inflight_bytes=1000) as server:
        path = await server.open()
        assert (await server.push(path, "x" * 1000)).status_code == 200
        assert (await server.push(path, "x" * 1001)).status_code == 413


async def test_a_length_beside_chunks_says_nothing_of_the_body() -> None:
    async with served(max_body_bytes=1000) as server:
        path, go_on = await server.open(), asyncio.Event()
        both = {"Transfer-Encoding": "chunked", "Content-Length": "2"}
        first = await _begun(server, path, go_on, **both)
        assert server.frontend.bodies.num_taken == 1000
        go_on.set()
        assert (await first).status_code == 200


async def test_what_a_request_has_taken_is_given_back_when_it_fails() -> None:
    async with served(max_body_bytes=1000, enqueue_deadline_s=SHORT_S) as server:
        path = await server.open()
        for content in (b"\xff", b"x" * 1001, _held_body(asyncio.Event())):
            answer = await server.http.post(f"{path}/frame", content=content, headers=TEXT)
            assert answer.is_error
            assert server.frontend.bodies.num_taken == 0


async def test_a_waiting_reply_takes_nothing() -> None:
    async with served() as server:
        path = await server.open()
        server.engine.hold_pushes = asyncio.Event()
        first = asyncio.create_task(server.push(path, "hi"))
        await come_true(lambda: len(server.engine.waiting) == 1)
        assert server.frontend.bodies.num_taken == 0
        server.engine.hold_pushes.set()
        assert (await first).status_code == 200


@pytest.mark.parametrize("kind", [TEXT, PNG, {"Content-Type": "multipart/form-data; boundary=b"}])
async def test_a_second_chunk_is_refused_before_its_body_is_read(kind: dict[str, str]) -> None:
    is_read = False

    async def unread() -> AsyncIterator[bytes]:
        nonlocal is_read
        is_read = True
        yield image_bytes()

    async with served() as server:
        path = await server.open()
        server.engine.hold_pushes = asyncio.Event()
        first = asyncio.create_task(server.push(path, "hi"))
        await come_true(lambda: len(server.engine.waiting) == 1)
        second = await server.http.post(f"{path}/frame", content=unread(), headers=kind)
        assert (second.status_code, error_of(second)["code"]) == (409, "frame_pending")
        assert not is_read
        # JSON may name the index of the pending chunk.
        again = asyncio.create_task(server.http.post(f"{path}/frame", json={"text": "hi", "frame_index": 0}))
        await asyncio.sleep(0.01)
        server.engine.hold_pushes.set()
        assert (await first).json() == (await again).json()


async def test_a_length_of_thousands_of_digits_is_too_long() -> None:
    async with served() as server:
        path = await server.open()
        for url in (SESSIONS, f"{path}/frame"):
            answer = await server.http.post(url, content="{}", headers={**TEXT, "Content-Length": "9" * 5000})
            assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")

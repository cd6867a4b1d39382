"""Connections that break, against a real server on a loopback port."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.fakes.session_engine import FakeEngine
from tests.unit.http.serving import PATIENCE_S, SESSIONS, TEXT, loopback, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(params=[False, True], ids=["plain", "middleware"])
def http(engine: FakeEngine, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    with (
        loopback(engine, behind_middleware=request.param) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_S) as client,
    ):
        yield client


def _open(http: httpx.Client) -> str:
    return f"{SESSIONS}/{http.post(SESSIONS).json()['session_id']}"


def _send(http: httpx.Client, path: str, body: bytes, *, length: int, query: str = "") -> socket.socket:
    """Send (a part of) a push; return the socket, to be closed by the caller."""
    connection = socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=PATIENCE_S)
    head = (
        f"POST {path}/frame{query} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def test_a_body_cut_half_way_pushes_nothing_and_the_session_goes_on(engine: FakeEngine, http: httpx.Client) -> None:
    path = _open(http)
    with _send(http, path, b"only the begin", length=100):
        pass
    answer = http.post(f"{path}/frame", content="hi", headers=TEXT, params={"frame_index": 0})
    assert answer.json()["text"] == "hi "
    assert engine.sessions[0].turns == ["hi"]


@pytest.mark.parametrize("query", ["", "?stream=1"])
@pytest.mark.parametrize("num_pieces", [0, 1])
def test_a_client_that_disconnects_before_the_reply_ends_the_session(
    engine: FakeEngine, http: httpx.Client, query: str, num_pieces: int
) -> None:
    path = _open(http)
    engine.pieces_before_hold = num_pieces
    engine.hold_pushes = asyncio.Event()
    with _send(http, path, b"one two", length=7, query=query) as connection:
        wait_until(lambda: http.get(path).json()["state"] == "pending")
        if query and num_pieces:
            received = b""
            while b'data: {"text": "one "}' not in received:
                received += connection.recv(4096)
    wait_until(lambda: not engine.live)
    status = http.get(path).json()
    assert (status["state"], status["reason"]) == ("ended", "the client disconnected before the reply was complete")
    assert http.post(f"{path}/frame", content="hi", headers=TEXT).json()["error"]["code"] == "ended_disconnect"
    assert engine.sessions[0].num_closes == 1


def test_a_client_that_asks_again_before_its_old_connection_is_gone_loses_nothing(
    engine: FakeEngine, http: httpx.Client
) -> None:
    path = _open(http)
    engine.hold_pushes = asyncio.Event()
    old = _send(http, path, b"one two", length=7)
    wait_until(lambda: http.get(path).json()["state"] == "pending")
    new = _send(http, path, b"one two", length=7, query="?frame_index=0&stream=1")
    # Another request proves that the server has read that one.
    with new:
        refused = http.post(f"{path}/frame", content="other", headers=TEXT, params={"frame_index": 0})
        assert refused.json()["error"]["code"] == "frame_differs"
        old.close()
        assert http.get(path).json()["state"] == "pending"
        engine.hold_pushes._loop.call_soon_threadsafe(engine.hold_pushes.set)  # type: ignore[attr-defined]
        received = b""
        while b"event: reply" not in received:
            received += new.recv(4096)
    assert b'data: {"text": "one "}' in received
    assert http.get(path).json()["frames"] == 1


def test_pieces_are_sent_while_the_reply_is_made(engine: FakeEngine, http: httpx.Client) -> None:
    path = _open(http)
    engine.pieces_before_hold = 1
    engine.hold_pushes = asyncio.Event()
    with http.stream("POST", f"{path}/frame?stream=1", content="one two", headers=TEXT) as answer:
        lines = answer.iter_lines()
        assert next(lines) == 'data: {"text": "one "}'
        assert http.get(path).json()["state"] == "pending"
        http.delete(path)
        assert "event: error" in list(lines)


def test_a_body_that_is_too_long_is_answered_before_it_is_sent(engine: FakeEngine, http: httpx.Client) -> None:
    path = _open(http)
    with _send(http, path, b"", length=2**33) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert not engine.sessions[0].turns


def test_a_server_that_stops_closes_its_sessions() -> None:
    engine = FakeEngine()
    with loopback(engine) as address, httpx.Client(base_url=address, timeout=PATIENCE_S) as http:
        _open(http)
        assert engine.live
    assert not engine.live


@pytest.mark.parametrize("behind_middleware", [False, True])
def test_a_client_that_disconnects_before_it_knows_its_session_leaves_none(*, behind_middleware: bool) -> None:
    engine = FakeEngine()
    with (
        loopback(engine, behind_middleware=behind_middleware, idle_timeout_s=0.3, reaper_period_s=30) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_S) as http,
    ):
        path = _open(http)
        http.post(f"{path}/frame", content="hi", headers=TEXT)
        time.sleep(0.4)
        # The next open waits until the engine has let go of the silent session.
        engine.hold_closes = asyncio.Event()
        with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=PATIENCE_S) as connection:
            connection.sendall(f"POST {SESSIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
            wait_until(lambda: engine.sessions[0].num_closes == 1)
            # It gets an end of the stream for its own one when the server has noticed that.
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        engine.hold_closes._loop.call_soon_threadsafe(engine.hold_closes.set)  # type: ignore[attr-defined]
        wait_until(lambda: len(engine.sessions) == 2 and not engine.live)

"""Both clients against the session frontend, and against connections that break."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvpolicy.adapters.http.frontend import SessionFrontend
from kvpolicy.adapters.http.settings import ServerSettings
from kvpolicy.client import (
    AsyncSessionClient,
    FrameReply,
    SessionApiError,
    SessionClient,
    SessionConnectionError,
)
from kvpolicy.client.exchange import DEFAULT_TIMEOUT
from kvpolicy.client.values import Segment
from kvpolicy.core.errors import (
    CapacityError,
    ChunkRefusedError,
    PolicyUsageError,
    SessionClosedError,
    SessionFailedError,
)
from tests.fakes.session_engine import FakeEngine
from tests.unit.http.serving import image_bytes, loopback, make_app, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[SessionClient]:
    with loopback(engine, max_sessions=2, reply_deadline_s=60) as address, SessionClient(address) as client:
        yield client


def test_a_session_from_opening_to_closing(engine: FakeEngine, client: SessionClient) -> None:
    with client.open(
        system_prompt="Be short.",
        retention={"total_tokens": 2048},
        sampling={"temperature": 0.0},
        priority=2,
        model="fake-model",
    ) as session:
        assert session.opened.max_blocks == 128
        assert session.opened.sampling["temperature"] == 0.0
        first = session.push("one two")
        assert isinstance(first, FrameReply)
        assert (first.text, first.frame_index, first.chunk_tokens) == ("one two ", 0, 2)
        assert session.push(image_bytes(8, 6)).text == "8x6 "
        assert session.push(image_bytes(8, 6, kind="JPEG"), text="what?", sampling={"seed": 1}).text == "8x6 what? "
        assert list(session.stream("three four")) == ["three ", "four "]
        assert session.last_reply is not None
        assert (session.last_reply.text, session.last_reply.frame_index) == ("three four ", 3)
        assert session.push("five six", sampling={"seed": 2}).frame_index == 4
        status = session.status()
        assert (status.state, status.frames, status.session_id) == ("idle", 5, session.id)
        assert status.segments[0] == Segment("anchor", 2)
    assert session.status().state == "ended"
    assert session.close() is True
    assert not engine.live
    assert [sampling and sampling["seed"] for sampling in engine.sessions[0].samplings] == [None, None, 1, None, 2]
    assert (engine.opened[0]["system_prompt"], engine.opened[0]["priority"]) == ("Be short.", 2)


def test_what_is_unset_is_left_to_the_server_and_none_is_a_value(client: SessionClient) -> None:
    with client.open() as session:
        assert session.opened.retention is not None
        assert session.opened.retention["total_tokens"] == 5678
    with client.open(retention=None) as session:
        assert session.opened.retention is None


def test_errors_of_the_server_are_errors_of_the_core(engine: FakeEngine, client: SessionClient) -> None:
    with pytest.raises(PolicyUsageError, match="unknown key 'total_token'"):
        client.open(retention={"total_token": 5})
    with pytest.raises(PolicyUsageError, match="model: expected fake-model"):
        client.open(model="another")
    with client.open(retention={"total_tokens": 1024}) as session:
        with client.open(retention={"total_tokens": 1024}), pytest.raises(CapacityError, match="at most 2 may be"):
            client.open()
        engine.script.append(ChunkRefusedError("chunk_too_long", "it is too long"))
        with pytest.raises(ChunkRefusedError, match="it is too long") as refused:
            session.push("hi")
        assert refused.value.code == "chunk_too_long"
        engine.script.append(ChunkRefusedError("full", "it is full"))
        with pytest.raises(ChunkRefusedError):
            list(session.stream("hi"))
        assert session.push("hi").frame_index == 0
        with pytest.raises(PolicyUsageError, match="at most 8388608 bytes"):
            session.push("x" * 9_000_000)
        engine.script.append(SessionFailedError("context_full", "it was full"))
        engine.errors_end_sessions = True
        with pytest.raises(SessionFailedError, match="it was full"):
            session.push("hi")
        with pytest.raises(SessionFailedError, match="it was full"):
            session.push("hi")


def test_a_session_that_was_closed_elsewhere(client: SessionClient) -> None:
    session = client.open()
    session.close()
    with pytest.raises(SessionClosedError, match="its client closed it"):
        session.push("hi")
    with pytest.raises(SessionClosedError, match="its client closed it"):
        list(session.stream("hi"))
    session.id = "another"
    with pytest.raises(SessionApiError, match="404 unknown_session") as caught:
        session.push("hi")
    assert (caught.value.status, caught.value.code) == (404, "unknown_session")
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert str(copy) == str(caught.value)
    assert session.close() is True


def test_a_pending_chunk_is_an_error_of_its_own(engine: FakeEngine, client: SessionClient) -> None:
    session = client.open()
    engine.pieces_before_hold = 1
    engine.hold_pushes = asyncio.Event()
    pieces = session.stream("one two")
    assert next(pieces) == "one "
    with pytest.raises(PolicyUsageError, match="one chunk is in flight"):
        session.push("another")
    # Leaving early disconnects, and that closes the session.
    pieces.close()
    wait_until(lambda: not engine.live)
    with pytest.raises(SessionClosedError, match="the client disconnected"):
        session.push("one two")


def test_an_error_in_mid_stream(engine: FakeEngine, client: SessionClient) -> None:
    session = client.open()
    engine.pieces_before_hold = 1
    engine.hold_pushes = asyncio.Event()
    pieces = session.stream("one two")
    assert next(pieces) == "one "
    session.close()
    with pytest.raises(SessionClosedError, match="its client closed it"):
        next(pieces)


@pytest.mark.parametrize(
    ("turn", "text", "words"), [("hi", "and more", "text: expected none"), (b"no image", "", "turn: expected text, or")]
)
def test_a_turn_that_is_none_is_not_sent(client: SessionClient, turn: str | bytes, text: str, words: str) -> None:
    with client.open() as session, pytest.raises(PolicyUsageError, match=words):
        session.push(turn, text=text)


REPLY = {
    "session_id": "s",
    "frame_index": 0,
    "text": "hi",
    "finish_reason": "stop",
    "stop_reason": None,
    "chunk_tokens": 1,
    "reply_tokens": 1,
    "ttft_s": 0.1,
    "latency_s": 0.2,
    "num_evicted_tokens": 0,
    "resident_tokens": 2,
    "blocks": 1,
    "consolidated": False,
    "a_field_of_a_newer_server": 1,
}
PATH_OF_A_SECRET = "/v1/streaming/sessions/0rAV1dKGMgSzQkWfCq1LJQsK6nW9xBbE"
OPENED = {"session_id": "s", "model": "m", "max_blocks": 1, "retention": None, "sampling": {}}


def _script(*script: httpx.Response | Exception) -> tuple[httpx.MockTransport, list[httpx.Request]]:
    """Return a server whose answers, after the opening, are the script; and what it is asked."""
    requests: list[httpx.Request] = []
    answers: list[Any] = [httpx.Response(201, json=OPENED), *script]

    def handle(request: httpx.Request) -> httpx.Response:
        request.read()
        requests.append(request)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, httpx.Response)
        return answer

    return httpx.MockTransport(handle), requests


def _scripted(*script: httpx.Response | Exception) -> tuple[SessionClient, list[httpx.Request]]:
    """Return a client whose requests, after the opening, meet the script."""
    transport, requests = _script(*script)
    return SessionClient("http://test", api_key="key", transport=transport), requests


def test_every_request_has_the_key_and_the_same_routing_key() -> None:
    client, requests = _scripted(httpx.Response(200, json=REPLY), httpx.Response(200, json={"closed": True}))
    with client, client.open(routing_key="camera-7") as session:
        session.push("hi")
    assert {request.headers["authorization"] for request in requests} == {"Bearer key"}
    assert {request.headers["x-session-id"] for request in requests} == {"camera-7"}
    client, requests = _scripted(httpx.Response(200, json={"closed": True}))
    with client, client.open() as session:
        assert len(session.routing_key) == 16
    assert {request.headers["x-session-id"] for request in requests} == {session.routing_key}


def _unreachable(code: str = "server_unreachable") -> httpx.Response:
    detail = {"message": "nobody listens", "type": "SessionFailedError", "code": code, "reasons": ["nobody listens"]}
    return httpx.Response(502, json={"error": detail})


def _routers_words(num_gone: int, last: httpx.Response) -> tuple[httpx.MockTransport, list[str]]:
    """Return a router that finds so many servers gone, and the keys that it is asked with."""
    answers, keys = [*(_unreachable() for _ in range(num_gone)), last], []

    def handle(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["x-session-id"])
        return answers.pop(0)

    return httpx.MockTransport(handle), keys


async def test_opening_tries_other_keys_where_the_server_of_one_is_gone() -> None:
    transport, keys = _routers_words(3, httpx.Response(201, json=OPENED))
    session = SessionClient("http://test", transport=transport).open()
    assert session.routing_key == keys[-1]
    assert len(set(keys)) == 4

    transport, keys = _routers_words(3, httpx.Response(201, json=OPENED))
    async with AsyncSessionClient("http://test", transport=transport) as client:
        assert (await client.open()).routing_key == keys[-1]
    assert len(set(keys)) == 4
    transport, keys = _routers_words(1, httpx.Response(201, json=OPENED))
    async with AsyncSessionClient("http://test", transport=transport) as client:
        with pytest.raises(SessionFailedError, match="nobody listens"):
            await client.open(routing_key="camera-7")


def test_opening_does_not_try_for_ever_nor_with_a_key_of_its_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.client.exchange._OPENING_S", 600.0)
    transport, keys = _routers_words(63, _unreachable())
    with pytest.raises(SessionFailedError, match="nobody listens"):
        SessionClient("http://test", transport=transport).open()
    assert len(set(keys)) == len(keys) == 64
    with monkeypatch.context() as patch:
        patch.setattr("kvpolicy.client.exchange._OPENING_S", 0.0)
        transport, keys = _routers_words(63, _unreachable())
        with pytest.raises(SessionFailedError, match="nobody listens"):
            SessionClient("http://test", transport=transport).open()
        assert len(keys) == 1
    transport, keys = _routers_words(0, _unreachable("server_late"))
    with pytest.raises(SessionFailedError, match="nobody listens"):
        SessionClient("http://test", transport=transport).open()
    assert len(keys) == 1
    transport, keys = _routers_words(1, httpx.Response(201, json=OPENED))
    with pytest.raises(SessionFailedError, match="nobody listens"):
        SessionClient("http://test", transport=transport).open(routing_key="camera-7")
    assert keys == ["camera-7"]


@pytest.mark.parametrize("broken", [httpx.ReadError("gone"), httpx.RemoteProtocolError("half an answer")])
@pytest.mark.parametrize("streams", ["push", "stream"])
def test_a_push_is_sent_once_more_under_the_same_index(broken: Exception, streams: str) -> None:
    events = f'data: {{"text": "hi"}}\n\nevent: reply\ndata: {httpx.Response(200, json=REPLY).text}\n\n'
    good = httpx.Response(200, json=REPLY) if streams == "push" else httpx.Response(200, text=events)
    client, requests = _scripted(broken, good)
    session = client.open()
    if streams == "push":
        assert session.push("hi").text == "hi"
    else:
        assert list(session.stream("hi")) == ["hi"]
    assert [request.url.params["frame_index"] for request in requests[1:]] == ["0", "0"]
    assert requests[1].content == requests[2].content
    client, requests = _scripted(broken, broken)
    session = client.open()
    with pytest.raises(SessionConnectionError, match="POST /v1/streaming/sessions/s/frame"):
        session.push("hi") if streams == "push" else list(session.stream("hi"))
    assert len(requests) == 3


async def test_an_opening_is_not_sent_again() -> None:
    """Nobody would know the id of the session that the lost answer was about."""
    num_asked = 0

    def handle(_: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        raise httpx.ReadError("gone")

    with pytest.raises(SessionConnectionError, match="POST /v1/streaming/sessions: ReadError: gone"):
        SessionClient("http://test", transport=httpx.MockTransport(handle)).open()
    assert num_asked == 1

    async with AsyncSessionClient("http://test", transport=httpx.MockTransport(handle)) as client:
        with pytest.raises(SessionConnectionError):
            await client.open()
    assert num_asked == 2


REFUSED = {"error": {"message": "m", "type": "PolicyUsageError", "code": "invalid", "reasons": ["m"]}}
FAULT = {"error": {"message": "m", "type": "InvariantError", "code": "internal", "reasons": ["m"]}}
STATUS: dict[str, object] = {
    "session_id": "s",
    "state": "idle",
    "reason": None,
    "frames": 1,
    "refused": 0,
    "reply_tokens": 1,
    "resident_tokens": 2,
    "blocks": 1,
    "max_blocks": 2,
    "num_evictions": 0,
    "num_evicted_tokens": 0,
    "num_consolidations": 0,
    "num_parks": 0,
    "segments": [],
    "age_s": 1.0,
    "idle_s": 0.1,
}


async def test_a_question_and_a_close_are_sent_once_more_too() -> None:
    def script() -> list[httpx.Response | Exception]:
        gone = httpx.ReadError("gone")
        return [gone, httpx.Response(200, json=STATUS), gone, httpx.Response(200, json={"closed": False})]

    asked = ["POST", "GET", "GET", "DELETE", "DELETE"]
    client, requests = _scripted(*script())
    session = client.open()
    assert session.status().frames == 1
    assert session.close() is False
    assert [request.method for request in requests] == asked

    transport, requests = _script(*script())
    async with AsyncSessionClient("http://test", transport=transport) as other:
        its_session = await other.open()
        assert (await its_session.status()).frames == 1
        assert await its_session.close() is False
    assert [request.method for request in requests] == asked


def test_after_a_lost_answer_another_chunk_asks_how_far_the_server_is() -> None:
    """The server may have answered the chunk whose answer was lost: its index is taken then."""
    gone = httpx.ReadError("gone")
    later = httpx.Response(200, json=REPLY | {"frame_index": 1})
    client, requests = _scripted(gone, gone, httpx.Response(200, json=STATUS), later, later)
    session = client.open()
    with pytest.raises(SessionConnectionError):
        session.push("hi")
    assert session.push("something else").frame_index == 1
    assert [request.method for request in requests[3:]] == ["GET", "POST"]
    assert requests[-1].url.params["frame_index"] == "1"
    session.push("and on")
    assert requests[-1].url.params["frame_index"] == "2"


def test_after_a_lost_answer_the_same_chunk_asks_for_it_again() -> None:
    gone = httpx.ReadError("gone")
    client, requests = _scripted(gone, gone, httpx.Response(200, json=REPLY))
    session = client.open()
    with pytest.raises(SessionConnectionError):
        session.push("hi")
    assert session.push("hi").frame_index == 0
    assert requests[-1].url.params["frame_index"] == "0"


async def test_the_asynchronous_client_asks_after_a_lost_answer_too() -> None:
    gone = httpx.ReadError("gone")
    transport, requests = _script(
        gone,
        gone,
        httpx.Response(200, json=REPLY),
        gone,
        gone,
        httpx.Response(200, json=STATUS | {"frames": 2}),
        httpx.Response(200, json=REPLY | {"frame_index": 2}),
        httpx.Response(200, json=REPLY | {"frame_index": 3}),
    )
    async with AsyncSessionClient("http://test", transport=transport) as client:
        session = await client.open()
        with pytest.raises(SessionConnectionError):
            await session.push("hi")
        assert (await session.push("hi")).frame_index == 0
        with pytest.raises(SessionConnectionError):
            await session.push("and on")
        await session.push("something else")
        await session.push("and on")
    assert [(request.method, request.url.params.get("frame_index")) for request in requests[1:]] == [
        *[("POST", "0")] * 3,
        *[("POST", "1")] * 2,
        ("GET", None),
        ("POST", "2"),
        ("POST", "3"),
    ]


def test_the_client_waits_as_long_as_the_server_may_take() -> None:
    server = ServerSettings()
    assert DEFAULT_TIMEOUT.write == server.enqueue_deadline_s
    assert DEFAULT_TIMEOUT.read is not None
    assert DEFAULT_TIMEOUT.read > server.enqueue_deadline_s + server.reply_deadline_s


def test_what_is_late_is_not_sent_again() -> None:
    client, requests = _scripted(httpx.ReadTimeout("late"))
    with pytest.raises(SessionConnectionError, match="ReadTimeout: late"):
        client.open().push("hi")
    assert len(requests) == 2


@pytest.mark.parametrize(
    "answer", [httpx.ReadTimeout("late"), httpx.Response(404, text=f"Cannot GET {PATH_OF_A_SECRET}/frame")]
)
def test_no_error_has_a_whole_id_in_its_text(answer: httpx.Response | Exception) -> None:
    secret = PATH_OF_A_SECRET.rpartition("/")[2]
    client, _ = _scripted(answer)
    session = client.open()
    session.id = secret
    with pytest.raises((SessionConnectionError, SessionApiError)) as caught:
        session.push("hi")
    assert f"/v1/streaming/sessions/{secret[:8]}.../frame" in str(caught.value)
    assert secret not in repr(caught.value)
    assert session.id == secret


PIECE = b'data: {"text": "one "}\n\n'


def _broken_off() -> Iterator[bytes]:
    yield PIECE
    raise httpx.ReadError("gone")


async def _broken_off_later() -> AsyncIterator[bytes]:
    yield PIECE
    raise httpx.ReadError("gone")


async def test_a_stream_that_has_begun_is_not_sent_again() -> None:
    """Its pieces would come twice, and the server has ended the session of a client that is gone."""
    client, requests = _scripted(httpx.Response(200, content=_broken_off()))
    pieces = client.open().stream("one two")
    assert next(pieces) == "one "
    with pytest.raises(SessionConnectionError, match="ReadError: gone"):
        next(pieces)
    assert len(requests) == 2

    transport, requests = _script(httpx.Response(200, content=_broken_off_later()))
    async with AsyncSessionClient("http://test", transport=transport) as other:
        its_pieces = (await other.open()).stream("one two")
        assert await anext(its_pieces) == "one "
        with pytest.raises(SessionConnectionError, match="ReadError: gone"):
            await anext(its_pieces)
    assert len(requests) == 2


class _OnePiece(httpx.AsyncByteStream):
    """A stream that has begun, and how often the client has left it."""

    num_closes = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield PIECE
        await asyncio.sleep(60)

    async def aclose(self) -> None:
        self.num_closes += 1


async def test_the_asynchronous_client_has_one_chunk_in_flight_until_it_leaves() -> None:
    stream = _OnePiece()
    transport, requests = _script(httpx.Response(200, stream=stream), httpx.Response(200, json=REPLY))
    async with AsyncSessionClient("http://test", transport=transport) as client:
        session = await client.open()
        async with aclosing(session.stream("one two")) as pieces:
            assert await anext(pieces) == "one "
            with pytest.raises(PolicyUsageError, match="one chunk is in flight"):
                await session.push("one two")
            assert stream.num_closes == 0
        assert stream.num_closes > 0
        assert (await session.push("one two")).frame_index == 0
    assert len(requests) == 3


async def test_after_an_error_the_next_chunk_is_sent_without_a_question() -> None:
    """An answer is an answer, good or bad: nothing has been lost."""
    client, requests = _scripted(httpx.Response(400, json=REFUSED), httpx.Response(200, json=REPLY))
    session = client.open()
    with pytest.raises(PolicyUsageError):
        session.push("hi")
    assert session.push("something else").frame_index == 0
    assert [request.method for request in requests] == ["POST"] * 3

    transport, requests = _script(httpx.Response(400, json=REFUSED), httpx.Response(200, json=REPLY))
    async with AsyncSessionClient("http://test", transport=transport) as other:
        its_session = await other.open()
        with pytest.raises(PolicyUsageError):
            await its_session.push("hi")
        assert (await its_session.push("something else")).frame_index == 0
    assert [request.method for request in requests] == ["POST"] * 3


def test_a_stream_that_just_ends_is_no_reply() -> None:
    text = ': comment\n\nevent: other\ndata: {}\n\ndata: {"text":\ndata: "h"}\n\n'
    client, _ = _scripted(httpx.Response(200, text=text))
    pieces = client.open().stream("hi")
    assert next(pieces) == "h"
    with pytest.raises(SessionConnectionError, match="before the reply was complete"):
        next(pieces)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(401, json={"error": "Unauthorized"}), "401 unknown: .*Unauthorized"),
        (httpx.Response(502, text="<html>bad gateway"), "502 unknown: <html>bad gateway"),
        (httpx.Response(502, text="x" * 1000), "502 unknown: x{500}$"),
        (httpx.Response(404, json={"detail": "Not Found"}), "404 unknown: .*Not Found"),
        (httpx.Response(200, text="not json"), "200 unknown: not json"),
        (
            httpx.Response(409, json={"error": {"message": "m", "type": "New", "code": "c", "reasons": ["m"]}}),
            "409 c: m",
        ),
    ],
)
def test_answers_of_others_are_errors_too(answer: httpx.Response, words: str) -> None:
    client, _ = _scripted(answer)
    with pytest.raises(SessionApiError, match=words):
        client.open().push("hi")


def test_an_error_of_the_block_is_not_hidden_by_one_of_closing() -> None:
    client, _ = _scripted(httpx.ReadTimeout("late"))
    with pytest.raises(ZeroDivisionError), client.open():
        raise ZeroDivisionError
    client, _ = _scripted(httpx.ReadTimeout("late"))
    with pytest.raises(SessionConnectionError), client.open():
        pass


async def test_closing_hides_no_error_but_that_of_an_unknown_session() -> None:
    client, _ = _scripted(httpx.Response(500, json=FAULT))
    with pytest.raises(SessionApiError, match="500 internal: m"):
        client.open().close()

    transport, _ = _script(httpx.Response(500, json=FAULT))
    async with AsyncSessionClient("http://test", transport=transport) as other:
        with pytest.raises(SessionApiError, match="500 internal: m"):
            await (await other.open()).close()


async def test_the_asynchronous_client_does_the_same() -> None:
    engine = FakeEngine()
    app = make_app(SessionFrontend(ServerSettings(max_sessions=1)), engine)
    async with (
        app.router.lifespan_context(app),
        AsyncSessionClient("http://test", transport=httpx.ASGITransport(app)) as client,
    ):
        async with await client.open(system_prompt="Be short.", retention={"total_tokens": 2048}) as session:
            assert (await session.push("one two")).text == "one two "
            assert (await session.push(image_bytes(), text="what?")).frame_index == 1
            async with aclosing(session.stream("three four")) as pieces:
                assert [piece async for piece in pieces] == ["three ", "four "]
            assert session.last_reply is not None
            assert session.last_reply.frame_index == 2
            assert (await session.push("five")).frame_index == 3
            assert (await session.status()).frames == 4
            with pytest.raises(CapacityError):
                await client.open()
            engine.script.append(ChunkRefusedError("full", "it is full"))
            with pytest.raises(ChunkRefusedError):
                await session.push("hi")
            engine.script.append(ChunkRefusedError("full", "it is full"))
            with pytest.raises(ChunkRefusedError):
                _ = [piece async for piece in session.stream("hi")]
        assert not engine.live
        with pytest.raises(SessionClosedError):
            await session.push("hi")
        with pytest.raises(SessionClosedError):
            _ = [piece async for piece in session.stream("hi")]
        session.id = "another"
        assert await session.close() is True


async def test_the_asynchronous_client_tries_once_more_too() -> None:
    answers: list[Any] = [
        httpx.Response(201, json=OPENED),
        httpx.ReadError("gone"),
        httpx.Response(200, json=REPLY),
        httpx.ReadError("gone"),
        httpx.ReadError("gone"),
        httpx.ReadTimeout("late"),
        httpx.ReadTimeout("late"),
    ]

    def handle(_: httpx.Request) -> httpx.Response:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, httpx.Response)
        return answer

    async with AsyncSessionClient("http://test", transport=httpx.MockTransport(handle)) as client:
        session = await client.open()
        assert (await session.push("hi")).text == "hi"
        with pytest.raises(SessionConnectionError):
            _ = [piece async for piece in session.stream("hi")]
        with pytest.raises(ZeroDivisionError):
            async with session:
                raise ZeroDivisionError
        with pytest.raises(SessionConnectionError):
            async with session:
                pass
        assert not answers

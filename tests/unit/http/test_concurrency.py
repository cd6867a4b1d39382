"""Two things at once: a chunk pending and another request; deadlines, closes, and a dying engine."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from kvpolicy.adapters.http.bodies import Frame
from kvpolicy.adapters.http.end_reasons import EndReason
from kvpolicy.adapters.http.frontend import SessionFrontend
from kvpolicy.adapters.http.pending_chunk import Flight
from kvpolicy.adapters.http.settings import ServerSettings
from kvpolicy.core.errors import ChunkRefusedError, PolicyUsageError, SessionFailedError
from tests.fakes.session_engine import FakeEngine, FakeSession
from tests.unit.http.serving import (
    PATIENCE_S,
    PNG,
    SESSIONS,
    SHORT_S,
    TEXT,
    Served,
    come_true,
    error_of,
    image_bytes,
    served,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import httpx

    from kvpolicy.adapters.http.session import ServedSession
    from kvpolicy.core.replies import Reply


async def _pending(server: Served, path: str, text: str = "first chunk") -> asyncio.Task[httpx.Response]:
    """Push a chunk that stays pending until ``hold_pushes`` is set."""
    server.engine.hold_pushes = asyncio.Event()
    task = asyncio.create_task(server.push(path, text))
    await come_true(lambda: len(server.engine.waiting) == 1)
    return task


def _go_on(server: Served) -> None:
    assert server.engine.hold_pushes is not None
    server.engine.hold_pushes.set()


async def test_a_second_push_gets_409_and_does_not_disturb_the_first() -> None:
    async with served() as server:
        path = await server.open()
        first = await _pending(server, path)
        for query in ({}, {"frame_index": 1}, {"frame_index": 7}):
            second = await server.push(path, "second chunk", **query)
            assert (second.status_code, error_of(second)["code"]) == (409, "frame_pending")
            assert "chunk 0 of this session is pending" in error_of(second)["message"]
        _go_on(server)
        assert (await first).json()["text"] == "first chunk "
        assert server.engine.sessions[0].turns == ["first chunk"]
        assert (await server.push(path, "second chunk", frame_index=1)).status_code == 200


async def test_other_sessions_go_on_while_one_is_pending() -> None:
    async with served(max_sessions=2) as server:
        # Room for both: the default total would not leave it.
        paths = [await server.open(retention={"total_tokens": 2048}) for _ in range(2)]
        first = await _pending(server, paths[0])
        server.engine.pieces_before_hold = 1
        second = asyncio.create_task(server.push(paths[1], "hi there", stream=True))
        await come_true(lambda: len(server.engine.waiting) == 2)
        _go_on(server)
        assert (await second).status_code == 200
        assert (await first).status_code == 200


async def test_the_index_of_the_pending_chunk_waits_for_the_same_reply() -> None:
    async with served() as server:
        path = await server.open()
        first = await _pending(server, path)
        again = asyncio.create_task(server.push(path, "first chunk", frame_index=0))
        streamed = asyncio.create_task(server.push(path, "first chunk", frame_index=0, stream=True))
        await asyncio.sleep(0.01)
        other = await server.push(path, "another chunk", frame_index=0)
        assert (other.status_code, error_of(other)["code"]) == (409, "frame_differs")
        _go_on(server)
        assert (await first).json() == (await again).json()
        assert 'data: {"text": "first "}' in (await streamed).text
        assert len(server.engine.sessions[0].turns) == 1


async def test_who_leaves_twice_has_left_once() -> None:
    abandoned: list[bool] = []
    flight = Flight(0, b"", lambda: abandoned.append(True))
    first, second = flight.wait(), flight.wait()
    with first:
        first.leave()
    assert not abandoned
    second.leave()
    assert abandoned == [True]


async def test_a_request_that_is_cancelled_takes_the_reply_from_no_other() -> None:
    async with served() as server:
        path = await server.open()
        first = await _pending(server, path)
        again = asyncio.create_task(server.push(path, "first chunk", frame_index=0))
        await asyncio.sleep(0.01)
        again.cancel()
        await asyncio.wait({again})
        _go_on(server)
        assert (await first).json()["text"] == "first chunk "


async def test_an_error_that_nobody_waits_for_is_no_fault_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as server:
        await server.open()
        [session] = server.frontend.registry.holding
        server.engine.hold_pushes = asyncio.Event()
        session.submit(Frame(text="hi"), deadline_s=asyncio.get_running_loop().time() + 10).leave()
        await come_true(lambda: not server.engine.live)
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_the_index_of_the_last_answer_gets_it_again() -> None:
    async with served() as server:
        path = await server.open()
        first = await server.push(path, "one", frame_index=0)
        second = await server.push(path, "two words", frame_index=1)
        assert (await server.push(path, "two words", frame_index=1)).json() == second.json()
        server.engine.script.append(ChunkRefusedError("full", "it is full"))
        assert (await server.push(path, "refused", frame_index=2)).status_code == 400
        assert (await server.push(path, "two words", frame_index=1)).json() == second.json()
        streamed = await server.push(path, "two words", frame_index=1, stream=True)
        assert streamed.text.count("data: ") == 3
        other = await server.push(path, "something else", frame_index=1)
        assert (other.status_code, error_of(other)["code"]) == (409, "frame_differs")
        assert "the next index is 2" in error_of(other)["message"]
        for index in (0, 3):
            gap = await server.push(path, "one", frame_index=index)
            assert (gap.status_code, error_of(gap)["code"]) == (409, "frame_index")
            assert f"expected 2, the next one, got {index}" in error_of(gap)["message"]
        gap = await server.http.post(f"{path}/frame?frame_index=3", json={"text": "one"})
        assert (gap.status_code, error_of(gap)["code"]) == (409, "frame_index")
        assert server.engine.sessions[0].turns == ["one", "two words"]
        assert first.json()["frame_index"] == 0


async def test_while_a_chunk_is_pending_no_answer_is_given_again() -> None:
    async with served() as server:
        path = await server.open()
        await server.push(path, "one", frame_index=0)
        second = await _pending(server, path, "two")
        again = await server.push(path, "one", frame_index=0)
        assert (again.status_code, error_of(again)["code"]) == (409, "frame_pending")
        _go_on(server)
        assert (await second).json()["frame_index"] == 1


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"json": {"text": "hi", "sampling": {"seed": 1}}}, {"json": {"text": "hi", "sampling": {"seed": 2}}}),
        ({"content": image_bytes(8, 6), "headers": PNG}, {"content": image_bytes(8, 7), "headers": PNG}),
        ({"content": image_bytes(), "headers": PNG}, {"files": {"image": image_bytes()}, "data": {"text": "what?"}}),
    ],
    ids=["sampling", "image", "text"],
)
async def test_every_part_of_a_chunk_tells_it_from_another_one(first: dict[str, Any], other: dict[str, Any]) -> None:
    async with served() as server:
        url = f"{await server.open()}/frame?frame_index=0"
        reply = await server.http.post(url, **first)
        assert (await server.http.post(url, **first)).json() == reply.json()
        refused = await server.http.post(url, **other)
        assert (refused.status_code, error_of(refused)["code"]) == (409, "frame_differs")


async def test_deleting_a_session_answers_its_pending_push_with_409() -> None:
    async with served() as server:
        path = await server.open()
        first = await _pending(server, path)
        closed = await server.http.delete(path)
        assert closed.json()["closed"] is True
        answer = await first
        assert (answer.status_code, error_of(answer)["code"]) == (409, "ended_client")
        assert "its client closed it" in error_of(answer)["message"]
        assert not server.engine.live
        assert server.engine.sessions[0].num_closes == 1


async def test_a_stream_that_has_begun_ends_with_an_error_event() -> None:
    async with served() as server:
        path = await server.open()
        server.engine.pieces_before_hold = 1
        server.engine.hold_pushes = asyncio.Event()
        streamed = asyncio.create_task(server.push(path, "one two", stream=True))
        await come_true(lambda: len(server.engine.waiting) == 1)
        await server.http.delete(path)
        answer = await streamed
        assert answer.status_code == 200
        assert answer.text.startswith('data: {"text": "one "}\n\nevent: error\ndata: {"error": ')
        assert '"code": "ended_client"' in answer.text


async def test_a_stream_that_has_not_begun_has_the_status_of_its_error() -> None:
    async with served() as server:
        path = await server.open()
        first = await _pending(server, path)
        request = server.http.post(
            f"{path}/frame?frame_index=0&stream=1", content="first chunk", headers={**TEXT, "X-Session-ID": "k"}
        )
        streamed = asyncio.create_task(request)
        await asyncio.sleep(0.01)
        await server.http.delete(path)
        assert ((await streamed).status_code, (await streamed).headers["x-session-id"]) == (409, "k")
        assert error_of(await streamed)["code"] == "ended_client"
        assert (await first).status_code == 409


async def test_a_reply_that_takes_too_long_closes_the_session() -> None:
    async with served(reply_deadline_s=0.05) as server:
        path = await server.open()
        server.engine.hold_pushes = asyncio.Event()
        answer = await server.push(path, "hi")
        assert (answer.status_code, error_of(answer)["code"]) == (503, "ended_reply_deadline")
        assert "the reply to chunk 0 took longer than 0.05 s" in error_of(answer)["message"]
        later = await server.push(path, "hi")
        assert (later.status_code, error_of(later)["code"]) == (409, "ended_reply_deadline")
        await asyncio.sleep(0)
        assert not server.engine.live


async def test_a_body_that_comes_too_slowly_is_not_pushed() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"the beginning"
        await asyncio.sleep(600)

    async with served(enqueue_deadline_s=SHORT_S) as server:
        path = await server.open()
        answer = await server.http.post(f"{path}/frame", content=slow(), headers=TEXT)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "enqueue_deadline")
        assert "the session goes on" in error_of(answer)["message"]
        assert (await server.push(path, "hi", frame_index=0)).status_code == 200


async def test_a_body_of_an_open_request_that_comes_too_slowly_opens_nothing() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(600)

    async with served(enqueue_deadline_s=0.05) as server:
        answer = await server.http.post(SESSIONS, content=slow(), headers={"Content-Type": "application/json"})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "enqueue_deadline")
        assert error_of(answer)["message"].startswith("body: reading it took longer than 0.05 s; nothing was opened")


async def test_decoding_that_takes_too_long_is_not_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.sleep(600)

    async with served(enqueue_deadline_s=SHORT_S) as server:
        path = await server.open()
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "to_thread", never)
            answer = await server.http.post(f"{path}/frame", content=image_bytes(), headers=PNG)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "enqueue_deadline")
        assert (await server.push(path, "hi", frame_index=0)).status_code == 200


async def test_reading_and_decoding_have_one_deadline_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slowly(function: Any, *arguments: Any) -> Any:
        await asyncio.sleep(0.3)
        return function(*arguments)

    async def slow() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.3)
        yield image_bytes()

    async with served(enqueue_deadline_s=0.5) as server:
        path = await server.open()
        monkeypatch.setattr(asyncio, "to_thread", slowly)
        answer = await server.http.post(f"{path}/frame", content=slow(), headers=PNG)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "enqueue_deadline")
        assert not server.engine.sessions[0].turns


@pytest.mark.parametrize("tells_waiters", [True, False])
async def test_a_dead_engine_answers_every_open_call_soon(tells_waiters: bool) -> None:  # noqa: FBT001 - a parameter
    async with served() as server:
        path = await server.open()
        first = await _pending(server, path)
        server.engine.die("out of memory", SessionFailedError("engine", "gone") if tells_waiters else None)
        answer = await asyncio.wait_for(first, PATIENCE_S)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "ended_engine")
        assert "out of memory" in error_of(answer)["message"]
        for later in (
            await server.push(path, "hi"),
            await server.http.get(path),
            await server.http.delete(path),
            await server.http.post(SESSIONS),
            await server.http.get("/v1/streaming/config"),
        ):
            assert (later.status_code, error_of(later)["code"]) == (503, "ended_engine")
            assert "out of memory" in error_of(later)["message"]


async def test_a_dead_engine_is_noticed_by_the_next_request() -> None:
    async with served() as server:
        path = await server.open()
        server.engine.die("out of memory", None)
        assert (await server.http.get(path)).status_code == 503
        assert all(session.ending is not None for session in server.frontend.registry.holding)


async def test_a_dead_engine_is_noticed_while_it_still_closes_another_session() -> None:
    async with served(idle_timeout_s=100, reaper_period_s=0.02, close_deadline_s=30) as server:
        paths = [await server.open(retention={"total_tokens": 2048}) for _ in range(2)]
        await server.push(paths[0], "hi")
        first = await _pending(server, paths[1])
        server.engine.hold_closes = asyncio.Event()
        server.clock.now_s += 101
        await come_true(lambda: server.engine.sessions[0].num_closes == 1)
        server.engine.die("out of memory", None)
        answer = await asyncio.wait_for(first, PATIENCE_S)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "ended_engine")
        server.engine.hold_closes.set()


async def test_the_watcher_outlives_an_error_and_logs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(reaper_period_s=0.02) as server:
        path = await server.open()
        first = await _pending(server, path)
        with monkeypatch.context() as patch:
            patch.setattr(server.frontend.registry, "notice_ends", lambda: 1 / 0)
            await come_true(lambda: "ZeroDivisionError" in caplog.text)
        server.engine.die("out of memory", None)
        answer = await asyncio.wait_for(first, PATIENCE_S)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "ended_engine")


async def test_what_the_engine_has_ended_gives_its_place_back_by_itself() -> None:
    async with served(reaper_period_s=0.02) as server:
        path = await server.open()
        server.engine.sessions[0].break_down(SessionFailedError("engine", "gone"))
        await come_true(lambda: not server.engine.live)
        answer = await server.push(path, "hi")
        assert (answer.status_code, error_of(answer)["code"]) == (409, "ended_failed")


async def test_what_the_engine_has_ended_is_noticed_by_the_next_request() -> None:
    async with served() as server:
        paths = [await server.open(retention={"total_tokens": 1024}) for _ in range(2)]
        for session in server.engine.sessions:
            session.break_down(SessionFailedError("engine", "gone"))
        answer = await server.push(paths[0], "hi")
        assert (answer.status_code, error_of(answer)["code"]) == (409, "ended_failed")
        status = (await server.http.get(paths[1])).json()
        assert (status["state"], status["reason"]) == ("ended", "the engine ended it")


async def test_a_late_release_keeps_the_place_until_it_is_there() -> None:
    async with served(max_sessions=1, close_deadline_s=0.05, idle_timeout_s=100) as server:
        path = await server.open()
        await server.push(path, "hi")
        server.clock.now_s += 50
        server.engine.hold_closes = asyncio.Event()
        assert (await server.http.delete(path)).json()["closed"] is False
        assert (await server.http.delete(path)).json()["closed"] is False
        assert (await server.push(path, "hi")).status_code == 409
        assert (await server.http.get(path)).json()["state"] == "ended"
        refused = await server.http.post(SESSIONS)
        # It is not silence that this place waits for.
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")
        server.engine.hold_closes.set()
        assert (await server.http.delete(path)).json()["closed"] is True
        assert (await server.http.post(SESSIONS)).status_code == 201


async def test_a_late_release_does_not_bring_back_what_is_forgotten() -> None:
    async with served(close_deadline_s=0.01, tombstone_s=60) as server:
        path = await server.open()
        await server.push(path, "hi")
        server.engine.hold_closes = asyncio.Event()
        await server.http.delete(path)
        server.clock.now_s += 61
        assert (await server.http.get(path)).status_code == 404
        server.engine.hold_closes.set()
        await come_true(lambda: not server.frontend.registry.holding)
        assert (await server.http.get(path)).status_code == 404


def _at_its_reply(engine: FakeEngine, happens: Callable[[FakeSession], None]) -> None:
    """Let something happen in the very moment of each reply."""

    class Session(FakeSession):
        def _count(self, text: str, num_tokens: int) -> Reply:
            happens(self)
            return super()._count(text, num_tokens)

    engine.session_class = Session


async def test_a_session_that_ends_with_its_reply_is_noticed_at_once() -> None:
    async with served() as server:
        _at_its_reply(server.engine, lambda session: session.break_down(SessionFailedError("full", "it is full")))
        path = await server.open()
        assert (await server.push(path, "hi")).status_code == 200
        assert all(session.ending is not None for session in server.frontend.registry.holding)


@pytest.mark.parametrize("error", [None, ChunkRefusedError("full", "it is full"), RuntimeError("a fault")])
async def test_what_comes_of_a_chunk_in_the_moment_of_the_end_does_not_count(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as server:

        def close(_: FakeSession) -> None:
            [session] = server.frontend.registry.holding
            session.end(EndReason.CLIENT, "its client closed it")
            ended.append(session)
            if error is not None:
                raise error

        ended: list[ServedSession] = []
        _at_its_reply(server.engine, close)
        answer = await server.push(await server.open(), "hi")
        assert (answer.status_code, error_of(answer)["code"]) == (409, "ended_client")
        [status] = [session.status() for session in ended]
        assert (status.frames, status.refused) == (0, 0)
        assert "a fault" not in caplog.text


async def test_a_chunk_that_the_engine_fails_says_why_even_if_its_end_is_noticed_first() -> None:
    async with served() as server:
        first = await _pending(server, await server.open())
        server.engine.sessions[0].break_down(SessionFailedError("context_full", "it was full"))
        server.frontend.registry.notice_ends()
        assert error_of(await first)["code"] == "context_full"


async def test_a_close_that_raises_gives_the_place_back() -> None:
    async with served(max_sessions=1) as server:
        path = await server.open()
        server.engine.close_error = RuntimeError("cannot")
        assert (await server.http.delete(path)).json()["closed"] is True
        server.engine.close_error = None
        assert (await server.http.post(SESSIONS)).status_code == 201


async def test_silent_sessions_are_reaped_before_an_admission_and_remembered_for_a_while() -> None:
    async with served(max_sessions=1, idle_timeout_s=100, tombstone_s=60) as server:
        path = await server.open()
        server.clock.now_s += 90
        await server.push(path, "hi")
        server.clock.now_s += 90
        assert (await server.http.post(SESSIONS)).status_code == 503
        server.clock.now_s += 11
        await server.open()
        assert server.engine.sessions[0].num_closes == 1
        answer = await server.push(path, "hi")
        assert (answer.status_code, error_of(answer)["code"]) == (409, "ended_idle")
        assert "idle for more than 100 s" in error_of(answer)["message"]
        status = (await server.http.get(path)).json()
        assert (status["state"], status["reason"], status["frames"]) == (
            "ended",
            "it was idle for more than 100 s",
            1,
        )
        server.clock.now_s += 61
        for later in (await server.push(path, "hi"), await server.http.get(path), await server.http.delete(path)):
            assert (later.status_code, error_of(later)["code"]) == (404, "unknown_session")


async def test_a_refused_chunk_is_use() -> None:
    async with served() as server:
        path = await server.open()
        first = await _pending(server, path)
        server.engine.script.append(ChunkRefusedError("full", "it is full"))
        server.clock.now_s += 90
        _go_on(server)
        assert (await first).status_code == 400
        assert (await server.http.get(path)).json()["idle_s"] == 0


async def test_a_chunk_that_begins_to_come_is_use() -> None:
    async with served(idle_timeout_s=100) as server:
        path = await server.open()
        server.clock.now_s += 90

        async def body() -> AsyncIterator[bytes]:
            yield b"h"
            server.clock.now_s += 90
            await server.frontend.registry.reap()
            yield b"i"

        answer = await server.http.post(f"{path}/frame", content=body(), headers=TEXT)
        assert answer.json()["text"] == "hi "


async def test_beyond_a_number_of_dead_sessions_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.adapters.http.registry._MAX_TOMBSTONES", 2)

    async with served() as server:
        paths = [await server.open(retention={"total_tokens": 1024}) for _ in range(3)]
        for path in paths:
            await server.http.delete(path)
        assert len(server.frontend.registry._tombstones) == 2
        assert [(await server.http.get(path)).status_code for path in paths] == [404, 200, 200]


async def test_the_reaper_runs_by_itself_and_spares_what_is_pending() -> None:
    async with served(idle_timeout_s=100, reaper_period_s=0.02) as server:
        paths = [await server.open(retention={"total_tokens": 2048}) for _ in range(2)]
        first = await _pending(server, paths[0])
        server.clock.now_s += 101
        await come_true(lambda: len(server.engine.live) == 1)
        assert (await server.http.get(paths[0])).json()["state"] == "pending"
        assert (await server.http.get(paths[1])).json()["state"] == "ended"
        _go_on(server)
        assert (await first).status_code == 200
        # Its silence begins now.
        assert (await server.http.get(paths[0])).json()["idle_s"] == 0
        assert server.frontend.registry.end_silent() == []


async def test_stopping_closes_everything_once() -> None:
    engine = FakeEngine()
    async with served(engine) as server:
        path = await server.open()
        first = await _pending(server, path)
        await server.frontend.stop()
        answer = await first
        assert (answer.status_code, error_of(answer)["code"]) == (503, "ended_shutdown")
        assert not engine.live
        await server.frontend.stop()
        for later in (await server.http.post(SESSIONS), await server.push(path, "hi")):
            assert (later.status_code, error_of(later)["code"]) == (503, "ended_shutdown")
    assert engine.sessions[0].num_closes == 1


async def test_an_opening_that_waits_while_the_server_stops_opens_nothing() -> None:
    async with served(idle_timeout_s=100) as server:
        await server.push(await server.open(), "hi")
        server.clock.now_s += 101
        server.engine.hold_closes = asyncio.Event()
        opening = asyncio.create_task(server.http.post(SESSIONS))
        await come_true(lambda: server.engine.sessions[0].num_closes == 1)
        stopping = asyncio.create_task(server.frontend.stop())
        await asyncio.sleep(0)
        server.engine.hold_closes.set()
        assert ((await opening).status_code, error_of(await opening)["code"]) == (503, "ended_shutdown")
        await stopping
        assert not server.engine.live


async def test_stopping_waits_until_the_engine_has_let_go() -> None:
    async with served() as server:
        await server.push(await server.open(), "hi")
        server.engine.hold_closes = asyncio.Event()
        stopping = asyncio.create_task(server.frontend.stop())
        await come_true(lambda: server.engine.sessions[0].num_closes == 1)
        assert not stopping.done()
        server.engine.hold_closes.set()
        await stopping
        assert not server.engine.live


async def test_a_push_that_does_not_notice_the_close_is_cancelled() -> None:
    async with served() as server:
        path = await server.open()
        server.engine.pushes_outlive_closes = True
        server.engine.hold_pushes = asyncio.Event()
        first = asyncio.create_task(server.push(path, "hi"))
        await come_true(lambda: server.frontend.registry.holding[0].state == "pending")
        assert (await server.http.delete(path)).json()["closed"] is True
        assert (await first).status_code == 409
        assert not [task for task in asyncio.all_tasks() if path.rpartition("/")[2] in task.get_name()]
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("push-")]


async def test_a_session_that_is_closed_while_a_body_comes_gets_no_chunk() -> None:
    async with served() as server:
        path = await server.open()

        async def body() -> AsyncIterator[bytes]:
            yield b"hi"
            await server.http.delete(path)

        answer = await server.http.post(f"{path}/frame", content=body(), headers=TEXT)
        assert (answer.status_code, error_of(answer)["code"]) == (409, "ended_client")
        assert not server.engine.sessions[0].turns


@pytest.mark.parametrize("code", ["ended_shutdown", "ended_engine"])
async def test_the_end_of_the_server_is_told_alike_to_every_push(code: str) -> None:
    async with served() as server:
        paths = [await server.open(retention={"total_tokens": 1024}) for _ in range(2)]
        pending = await _pending(server, paths[0])

        async def body() -> AsyncIterator[bytes]:
            yield b"hi"
            if code == "ended_shutdown":
                await server.frontend.stop()
            else:
                server.engine.die("out of memory", None)

        across = await server.http.post(f"{paths[1]}/frame", content=body(), headers=TEXT)
        for answer in (across, await asyncio.wait_for(pending, PATIENCE_S), await server.push(paths[1], "hi")):
            found = error_of(answer)
            assert (answer.status_code, found["code"], found["type"]) == (503, code, "SessionFailedError")
        assert not server.engine.sessions[1].turns


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_session_whose_opener_has_gone_before_the_answer_is_ended(*, is_gone: bool) -> None:
    async with served() as server:
        both: list[dict[str, Any]] = [{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]
        messages, sent = both[: 1 + is_gone], []

        async def receive() -> dict[str, Any]:
            if not messages:
                await asyncio.sleep(600)
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": SESSIONS, "query_string": b"", "headers": []}
        await asyncio.wait_for(server.app(scope, receive, send), PATIENCE_S)
        assert sent[0]["status"] == (499 if is_gone else 201)
        await come_true(lambda: len(server.engine.live) == (not is_gone))
        [session] = server.engine.sessions
        assert session.num_closes == is_gone


async def test_a_frontend_is_started_once_and_can_be_stopped_before() -> None:
    frontend = SessionFrontend(ServerSettings())
    await frontend.stop()
    async with served() as server:
        with pytest.raises(PolicyUsageError, match="expected one start, got a second one"):
            server.frontend.start(server.engine)


async def test_a_server_whose_send_fails_ends_the_session_too() -> None:
    async with served() as server:
        path = await server.open()
        server.engine.pieces_before_hold = 1
        server.engine.hold_pushes = asyncio.Event()
        bodies = [{"type": "http.request", "body": b"one two"}]

        async def receive() -> dict[str, Any]:
            if bodies:
                return bodies.pop()
            await asyncio.sleep(600)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                raise OSError

        scope = {
            "type": "http",
            "method": "POST",
            "path": f"{path}/frame",
            "query_string": b"stream=1",
            "headers": [(b"content-type", b"text/plain")],
        }
        await server.app(scope, receive, send)
        status = (await server.http.get(path)).json()
        assert (status["state"], status["reason"][:23]) == ("ended", "the client disconnected")

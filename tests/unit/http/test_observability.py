"""What Prometheus and the log show."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY

from kvpolicy.adapters.http import log
from kvpolicy.adapters.http.frontend import SessionFrontend
from kvpolicy.adapters.http.settings import ServerSettings
from kvpolicy.adapters.vllm.shared.log import write_to_stderr
from kvpolicy.core.errors import ChunkRefusedError
from tests.fakes.session_engine import FakeEngine
from tests.unit.http.serving import SESSIONS, come_true, served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

LABEL = {"model_name": "fake-model"}


def _value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"kvpolicy:session_{name}", {**LABEL, **labels}) or 0.0


async def test_the_metrics_follow_the_sessions() -> None:
    counters: list[tuple[str, dict[str, str]]] = [
        ("chunks_total", {}),
        ("evictions_total", {}),
        ("evicted_tokens_total", {}),
        ("consolidations_total", {}),
        ("refused_chunks_total", {"code": "full"}),
        ("refused_opens_total", {}),
        ("timeouts_total", {"deadline": "reply"}),
        ("closes_total", {"reason": "reply_deadline"}),
        ("closes_total", {"reason": "client"}),
        ("chunk_ttft_seconds_count", {}),
        ("chunk_ttft_seconds_sum", {}),
        ("chunk_latency_seconds_count", {}),
        ("chunk_latency_seconds_sum", {}),
    ]

    async with served(max_sessions=2) as server:
        before = [_value(name, **labels) for name, labels in counters]
        small = {"total_tokens": 1024}
        first, _ = [await server.open(retention=small) for _ in range(2)]
        assert (await server.http.post(SESSIONS)).status_code == 503
        await server.push(first, "word " * 400)
        server.engine.consolidates = True
        for _ in range(2):
            await server.push(first, "word " * 400)
        assert _value("open", state="idle") == 2
        assert (_value("resident_tokens"), _value("resident_blocks")) == (1024, 64)
        server.engine.script.append(ChunkRefusedError("full", "it is full"))
        await server.push(first, "hi")
        await server.http.delete(first)
        assert [_value("open", state=state) for state in ("idle", "pending", "closing")] == [1, 0, 0]
        assert _value("resident_tokens") == 0
    # No reply but the one that never comes has so short a deadline to meet.
    async with served(reply_deadline_s=0.05) as server:
        late = await server.open(retention=small)
        server.engine.hold_pushes = asyncio.Event()
        pending = asyncio.create_task(server.push(late, "hi"))
        await come_true(lambda: _value("open", state="pending") == 1)
        assert (await pending).status_code == 503
        assert [_value("open", state=state) for state in ("idle", "pending", "closing")] == [0, 0, 0]
        assert (
            [_value(name, **labels) - old for (name, labels), old in zip(counters, before, strict=True)]
        ) == pytest.approx([3, 2, 1376, 2, 1, 1, 1, 1, 1, 3, 0.03, 3, 0.06])


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Catch what the log writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("kvpolicy.http")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_the_log_has_one_event_each_and_never_a_text_or_an_id(lines: io.StringIO) -> None:
    engine = FakeEngine()
    async with served(engine) as server:
        path = await server.open(system_prompt="secret prompt")
        await server.push(path, "secret words")
        engine.script.append(ChunkRefusedError("full", "no room"))
        await server.push(path, "secret words")
        await server.http.delete(path)
        session_id = path.rpartition("/")[2]
    written = lines.getvalue()
    assert "secret" not in written
    assert session_id not in written
    events: list[dict[str, Any]] = [json.loads(line) for line in written.splitlines()]
    assert [event["event"] for event in events] == [
        "session.opened",
        "chunk.answered",
        "chunk.refused",
        "session.closed",
    ]
    assert {event["session"] for event in events} == {session_id[:8]}
    assert events[1]["reply_tokens"] == 2
    assert events[2]["code"] == "full"
    assert (events[3]["reason"], events[3]["frames"], events[3]["refused"]) == ("client", 1, 1)


def test_the_access_log_of_the_server_shows_no_more_of_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    access = logging.getLogger("uvicorn.access")
    monkeypatch.setattr(access, "filters", [])
    for _ in range(2):
        log.hide_session_ids()
    assert len(access.filters) == 1

    def written(path: str) -> str:
        arguments = ("127.0.0.1:5", "POST", path, "1.1", 200)
        record = logging.LogRecord(access.name, logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None)
        assert access.filter(record)
        return record.getMessage()

    path, session_id = "/v1/streaming/sessions/", "0rAV-dKGMgSz-kWfCq1LJQsK6nW9xB_E"
    head, tail = '127.0.0.1:5 - "POST ', ' HTTP/1.1" 200'
    assert written(f"{path}{session_id}/frame?stream=1") == f"{head}{path}0rAV-dKG.../frame?stream=1{tail}"
    assert written(f"{path}{session_id}") == f"{head}{path}0rAV-dKG...{tail}"
    assert written(f"{path}short") == f"{head}{path}short{tail}"
    assert written("/v1/models") == f"{head}/v1/models{tail}"


def test_the_access_log_is_cut_wherever_the_routes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """``kvpolicy serve`` and the endpoint plugin both attach a frontend."""
    access = logging.getLogger("uvicorn.access")
    monkeypatch.setattr(access, "filters", [])
    SessionFrontend(ServerSettings()).attach(FastAPI())
    assert len(access.filters) == 1


async def test_a_fault_is_logged_with_its_traceback(lines: io.StringIO) -> None:
    async with served() as server:
        path = await server.open()
        server.engine.script.append(RuntimeError("for the log"))
        await server.push(path, "hi")
    (fault,) = [event for event in map(json.loads, lines.getvalue().splitlines()) if event["event"] == "request.failed"]
    assert "RuntimeError: for the log" in fault["exception"]


async def test_a_release_that_is_late_or_fails_is_logged(lines: io.StringIO) -> None:
    before = _value("timeouts_total", deadline="close")
    async with served(close_deadline_s=0.01) as server:
        paths = [await server.open(retention={"total_tokens": 1024}) for _ in range(2)]
        await server.push(paths[0], "hi")
        server.engine.hold_closes = asyncio.Event()
        await server.http.delete(paths[0])
        assert [_value("open", state=state) for state in ("idle", "closing")] == [1, 1]
        server.engine.hold_closes.set()
        server.engine.close_error = RuntimeError("cannot")
        await server.http.delete(paths[1])
        shown = [path.rpartition("/")[2][:8] for path in paths]
    events = [json.loads(line) for line in lines.getvalue().splitlines()]
    late, failed = [event for event in events if event["event"].startswith("release.")]
    assert (late["event"], late["session"], late["after_s"]) == ("release.overdue", shown[0], 0.01)
    assert (failed["event"], failed["session"]) == ("release.failed", shown[1])
    assert "RuntimeError: cannot" in failed["exception"]
    assert _value("timeouts_total", deadline="close") == before + 1


async def test_a_body_that_comes_too_slowly_is_counted() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"the beginning"
        await asyncio.sleep(60)

    before = _value("timeouts_total", deadline="enqueue")
    async with served(enqueue_deadline_s=0.01) as server:
        assert (await server.http.post(SESSIONS, content=slow())).status_code == 503
    assert _value("timeouts_total", deadline="enqueue") == before + 1


def test_lines_are_for_people_on_a_terminal(lines: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log.make_logger().info("some.event", number=1)
    assert lines.getvalue().startswith("event='some.event' ")


def test_a_program_can_have_it_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``kvpolicy serve`` does, for everything that kvpolicy logs."""
    logger = logging.getLogger("kvpolicy")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    level = logger.level
    try:
        write_to_stderr()
        write_to_stderr()
        log.make_logger().info("some.event")
        assert json.loads(stream.getvalue())["event"] == "some.event"
    finally:
        logger.handlers.clear()
        logger.setLevel(level)
        logger.propagate = True

"""Opening, pushing, asking and closing over HTTP: what goes well."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import pytest
from attrs import fields_dict

from kvpolicy.adapters.http.schemas import FrameReply, StatusReply
from kvpolicy.client.values import SessionStatus
from kvpolicy.core.counts import SessionCounts
from kvpolicy.core.replies import Reply, SessionStats
from kvpolicy.core.session_port import ImageTurn
from tests.unit.http.serving import PNG, SESSIONS, TEXT, image_bytes, served


async def test_a_session_is_opened_fed_asked_and_closed() -> None:
    async with served() as server:
        opened = await server.http.post(
            SESSIONS,
            json={
                "model": "fake-model",
                "system_prompt": "Be short.",
                "retention": {"total_tokens": 2048},
                "sampling": {"temperature": 0.0},
                "priority": 3,
            },
        )
        body = opened.json()
        assert opened.status_code == 201
        assert body["model"] == "fake-model"
        assert body["max_blocks"] == 128
        assert body["retention"]["total_tokens"] == 2048
        assert body["retention"]["content_segments"] == 30
        assert body["sampling"] == {
            "max_tokens": 24,
            "temperature": 0.0,
            "top_p": 0.9,
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.0,
        }
        assert server.engine.opened == [
            {"system_prompt": "Be short.", "retention": {"total_tokens": 2048}, "priority": 3}
        ]
        assert body["retention"] == server.engine.sessions[0].retention
        path = f"{SESSIONS}/{body['session_id']}"
        server.clock.now_s += 2
        pushed = await server.push(path, "one two three")
        assert pushed.status_code == 200
        assert pushed.json() == {
            "session_id": body["session_id"],
            "frame_index": 0,
            "text": "one two three ",
            "finish_reason": "stop",
            "stop_reason": None,
            "chunk_tokens": 3,
            "reply_tokens": 3,
            "ttft_s": 0.01,
            "latency_s": 0.02,
            "num_evicted_tokens": 0,
            "resident_tokens": 6,
            "blocks": 1,
            "consolidated": False,
        }
        server.clock.now_s += 5
        status = (await server.http.get(path)).json()
        assert status == {
            "session_id": body["session_id"],
            "state": "idle",
            "reason": None,
            "frames": 1,
            "refused": 0,
            "reply_tokens": 3,
            "resident_tokens": 6,
            "blocks": 1,
            "max_blocks": 128,
            "num_evictions": 0,
            "num_evicted_tokens": 0,
            "num_consolidations": 0,
            "num_parks": 0,
            "segments": [{"kind": "anchor", "tokens": 3}, {"kind": "content", "tokens": 3}],
            "age_s": 7.0,
            "idle_s": 5.0,
        }
        closed = await server.http.delete(path)
        assert closed.json() == {"session_id": body["session_id"], "frames": 1, "closed": True}
        assert (await server.http.delete(path)).json() == closed.json()
        assert server.engine.sessions[0].num_closes == 1
        # What it has done is remembered for a while; it holds nothing any more.
        nothing = {"resident_tokens": 0, "blocks": 0, "segments": []}
        ended = status | nothing | {"state": "ended", "reason": "its client closed it", "idle_s": 5.0}
        assert (await server.http.get(path)).json() == ended


async def test_an_id_cannot_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the system's source of randomness, whole, and has at least 128 bits."""
    made: list[str] = []

    def token_urlsafe(num_bytes: int) -> str:
        assert num_bytes >= 16
        made.append(f"token-{len(made)}")
        return made[-1]

    monkeypatch.setattr("secrets.token_urlsafe", token_urlsafe)

    async with served() as server:
        assert ([(await server.http.post(SESSIONS)).json()["session_id"] for _ in range(2)]) == made


async def test_a_status_shows_every_count_of_the_engine() -> None:
    async with served() as server:
        path = await server.open()
        server.engine.sessions[0]._stats = SessionStats(
            num_reply_tokens=1,
            resident_tokens=2,
            num_blocks=3,
            num_evictions=4,
            num_evicted_tokens=5,
            num_consolidations=6,
            num_parks=7,
        )
        status = (await server.http.get(path)).json()
        names = "reply_tokens resident_tokens blocks num_evictions num_evicted_tokens num_consolidations num_parks"
        assert [status[name] for name in names.split()] == [1, 2, 3, 4, 5, 6, 7]


def test_counts_have_the_names_that_the_ledger_gives_them() -> None:
    names = set(fields_dict(SessionCounts))
    assert names <= set(StatusReply.model_fields)
    assert names <= set(fields_dict(SessionStats)) & set(fields_dict(SessionStatus))
    told_with_a_reply = names & set(fields_dict(Reply))
    assert told_with_a_reply == names & set(FrameReply.model_fields) == {"num_evicted_tokens"}


async def test_a_model_has_several_names_and_answers_have_the_first() -> None:
    async with served() as server:
        for name in ("fake-model", "its-other-name"):
            answer = await server.http.post(SESSIONS, json={"model": name})
            assert (answer.status_code, answer.json()["model"]) == (201, "fake-model")
        answer = await server.http.post(SESSIONS, json={"model": "another"})
        assert "expected fake-model or its-other-name, the one that this server serves, got 'another'" in answer.text


async def test_everything_has_a_default_and_null_keeps_everything() -> None:
    async with served() as server:
        default = (await server.http.post(SESSIONS)).json()
        assert default["retention"]["total_tokens"] == 5678  # floor(0.7 * 8192) - 24 - 2 * 16
        unbounded = (await server.http.post(SESSIONS, json={"retention": None})).json()
        assert unbounded["retention"] is None
        assert server.engine.opened[1]["retention"] is None
        await server.http.delete(f"{SESSIONS}/{default['session_id']}")
        cool = (await server.http.post(SESSIONS, json={"sampling": {"temperature": None}})).json()
        assert cool["sampling"]["temperature"] is None


async def test_a_chunk_comes_in_five_forms_under_two_names() -> None:
    async with served() as server:
        path = await server.open()
        png, jpeg = image_bytes(8, 6), image_bytes(10, 4, kind="JPEG")
        answers = [
            await server.http.post(
                f"{path}/frames", content="hello", headers={"Content-Type": "Text/Plain; charset=utf-8"}
            ),
            await server.http.post(f"{path}/frame", json={"text": "hello there", "sampling": {"max_tokens": 5}}),
            await server.http.post(f"{path}/frame", content=png, headers=PNG),
            # Its type is told by its first bytes, not by what the client says.
            await server.http.post(f"{path}/frame", content=jpeg, headers=PNG),
            await server.http.post(
                f"{path}/frame", files={"image": png}, data={"text": "what?", "sampling": '{"seed": 1}'}
            ),
            await server.http.post(f"{path}/frame", files={"image": png, "text": "as a file"}),
        ]
        texts = [answer.json()["text"] for answer in answers]
        assert texts == ["hello ", "hello there ", "8x6 ", "10x4 ", "8x6 what? ", "8x6 as a file "]
        assert [answer.json()["frame_index"] for answer in answers] == list(range(6))
        session = server.engine.sessions[0]
        turn = session.turns[2]
        assert isinstance(turn, ImageTurn)
        assert turn.image.mode == "RGB"
        base = {
            "max_tokens": 24,
            "temperature": 0.3,
            "top_p": 0.9,
            "repetition_penalty": 1.1,
            "frequency_penalty": 0,
        }
        assert session.samplings == [None, {**base, "max_tokens": 5}, None, None, {**base, "seed": 1}, None]


@pytest.mark.parametrize(
    "parameters",
    [
        "boundary=b",
        'boundary="b"; charset=latin-1',
        "charset=unicode_escape; boundary=b",
        "boundary=b; charset=utf-7",
        "boundary=b; charset=punycode",
        "boundary=b; charset=undefined",
        'boundary=b; charset="\x00"',
    ],
)
async def test_a_form_is_utf_8_whatever_it_says(parameters: str) -> None:
    async with served() as server:
        part = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
        text = "+2AA- \\ud800 -xn--a ä"
        answer = await server.http.post(
            f"{await server.open()}/frame",
            content=part % (b'image"; filename="f', image_bytes(8, 6)) + part % (b"text", text.encode()) + b"--b--",
            headers={"Content-Type": f"multipart/form-data; {parameters}"},
        )
        assert answer.json()["text"] == f"8x6 {text} "


@pytest.mark.parametrize("is_file", [True, False])
async def test_a_text_beside_an_image_may_be_as_long_as_the_body(
    monkeypatch: pytest.MonkeyPatch, *, is_file: bool
) -> None:
    def written(_: object) -> None:
        raise AssertionError("what clients send does not belong on a disk")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", written)

    async with served() as server:
        image, text = {"image": image_bytes(8, 6)}, {"text": "x" * 2**21}
        body: dict[str, Any] = {"files": image | text} if is_file else {"files": image, "data": text}
        pushed = await server.http.post(f"{await server.open()}/frame", **body)
        assert pushed.json()["text"] == f"8x6 {text['text']} "


@pytest.mark.parametrize("ask", ["query", "body"])
async def test_a_streamed_reply_is_pieces_and_then_the_whole(ask: str) -> None:
    async with served() as server:
        path = await server.open()
        if ask == "query":
            answer = await server.push(path, "one two", stream=True)
        else:
            answer = await server.http.post(f"{path}/frame", json={"text": "one two", "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        # Nothing on the way may keep it, or hold it back.
        assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-store", "no")
        events = answer.text.split("\n\n")
        assert events[:2] == ['data: {"text": "one "}', 'data: {"text": "two "}']
        head, _, data = events[2].partition("\n")
        assert head == "event: reply"
        assert json.loads(data.removeprefix("data: "))["text"] == "one two "
        assert events[3:] == [""]


async def test_the_routing_key_is_echoed_on_every_route_and_on_errors() -> None:
    key = {"X-Session-ID": "camera-7"}
    async with served() as server:
        opened = await server.http.post(SESSIONS, headers=key)
        path = f"{SESSIONS}/{opened.json()['session_id']}"
        answers = [
            opened,
            await server.http.post(f"{path}/frame", content="hi", headers={**TEXT, **key}),
            await server.http.post(f"{path}/frame?stream=1", content="hi", headers={**TEXT, **key}),
            await server.http.get(path, headers=key),
            await server.http.delete(path, headers=key),
            await server.http.get("/v1/streaming/config", headers=key),
            await server.http.get("/v1/streaming/console", headers=key),
            await server.http.post(f"{path}/frame", content="hi", headers={**TEXT, **key}),
        ]
        assert [answer.status_code for answer in answers] == [201, 200, 200, 200, 200, 200, 200, 409]
        assert {answer.headers["x-session-id"] for answer in answers} == {"camera-7"}
        assert "x-session-id" not in (await server.http.get("/v1/streaming/config")).headers


async def test_the_config_names_defaults_limits_and_the_engine() -> None:
    limits: dict[str, Any] = {
        "max_sessions": 3,
        "max_body_bytes": 1000,
        "max_frame_pixels": 2000,
        "enqueue_deadline_s": 1,
        "reply_deadline_s": 2,
        "close_deadline_s": 3,
        "idle_timeout_s": 4,
        "tombstone_s": 5,
    }
    async with served(**limits) as server:
        body = (await server.http.get("/v1/streaming/config")).json()
        assert body["model"] == "fake-model"
        assert body["engine"] == {
            "context_limit": 8192,
            "trained_range": 8192,
            "block_size": 16,
            "num_pool_blocks": 1000,
        }
        assert body["limits"] == limits | {"max_inflight_bytes": 16_000}
        assert body["sampling"]["max_tokens"] == 24
        assert body["sampling_fields"] == ["max_tokens", "temperature"]
        assert body["retention"]["content_segments"] == 30
        page = await server.http.get("/v1/streaming/console")
        assert page.headers["content-type"].startswith("text/html")
        # Nothing lists the sessions.
        assert (await server.http.get(SESSIONS)).status_code == 405


async def test_no_setting_allows_more_sessions_than_the_engine_takes() -> None:
    async with served(max_sessions=99) as server:
        assert (await server.http.get("/v1/streaming/config")).json()["limits"]["max_sessions"] == 8


async def test_ids_are_long_and_all_different() -> None:
    async with served() as server:
        ids = [(await server.open()).rpartition("/")[2] for _ in range(2)]
        assert len(set(ids)) == 2
        assert all(len(session_id) == 32 for session_id in ids)

"""Every status code with its message, all in one shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from attrs import evolve

from kvpolicy.adapters.http.end_reasons import Ending, EndReason
from kvpolicy.adapters.http.errors import api_error, bad_request
from kvpolicy.adapters.http.metrics import SessionMetrics
from kvpolicy.adapters.http.wording import field_reason
from kvpolicy.core.errors import (
    CapacityError,
    ChunkRefusedError,
    PolicyUsageError,
    SessionClosedError,
    SessionFailedError,
)
from tests.fakes.session_engine import FACTS, FakeEngine
from tests.unit.http.serving import PNG, SESSIONS, TEXT, error_of, image_bytes, served

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("request_", "status", "code", "words"),
    [
        ({"content": "{", "headers": JSON}, 400, "bad_json", "body: expected JSON"),
        ({"content": '{"priority": NaN}', "headers": JSON}, 400, "bad_json", "body: expected JSON"),
        ({"content": '"\\ud800"', "headers": JSON}, 400, "bad_json", "body: expected JSON"),
        ({"content": "{}", "headers": TEXT}, 400, "bad_content_type", "Content-Type: expected application/json"),
        ({"json": {"model": "other"}}, 400, "invalid", "model: expected fake-model"),
        ({"json": {"retention": {"total_token": 5}}}, 400, "invalid", "retention: unknown key 'total_token'"),
        ({"json": {"sampling": {"no_such_field": 5}}}, 400, "invalid", "sampling: and another reason"),
        ({"json": {"sampling": {"max_tokens": 0}}}, 400, "invalid", "max_tokens"),
        ({"json": {"retention": {"total_tokens": 99_999}}}, 400, "never_fits", "may need 6250 blocks"),
        ({"json": []}, 422, "invalid_fields", "body: expected an object, got a list"),
        (
            {"json": {"sampling": {"stop_token_ids": [7, -1]}}},
            422,
            "invalid_fields",
            "sampling.stop_token_ids.1: expected at least 0, got -1",
        ),
        ({"json": {"priority": "1", "nonsense": 1}}, 422, "invalid_fields", "priority: expected an integer, got text"),
        ({"json": {"nonsense": 1}}, 422, "invalid_fields", "nonsense: unknown; known here: model, system_prompt"),
        (
            {"json": {"sampling": {"max_tokens": "5"}}},
            422,
            "invalid_fields",
            "sampling.max_tokens: expected an integer, got text",
        ),
        (
            {"json": {"retention": {"total_tokens": True}}},
            422,
            "invalid_fields",
            "retention.total_tokens: expected an integer, got true",
        ),
        (
            {"json": {"priority": 2**40}},
            422,
            "invalid_fields",
            "priority: expected at most 2147483647, got 1099511627776",
        ),
        ({"content": b"x" * 2000, "headers": JSON}, 413, "body_too_large", "at most 1000 bytes"),
    ],
)
async def test_what_cannot_be_opened(request_: dict[str, Any], status: int, code: str, words: str) -> None:
    async with served(max_body_bytes=1000) as server:
        answer = await server.http.post(SESSIONS, **request_)
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (status, code)
        assert words in error["message"]
        assert server.frontend.registry.holding == ()
        assert not server.engine.live


async def test_all_reasons_come_at_once() -> None:
    async with served() as server:
        wanted = {"model": "other", "retention": {"total_tokens": "many", "content_segments": 0}}
        answer = await server.http.post(SESSIONS, json=wanted)
        assert answer.status_code == 422  # a wrong type
        wanted = {"model": "other", "retention": {"total_tokens": 5, "content_segments": 0, "sink": 4}}
        reasons = error_of(await server.http.post(SESSIONS, json=wanted))["reasons"]
        assert [reason.partition(":")[0] for reason in reasons][:2] == ["model", "retention"]
        assert len(reasons) == 4
        assert not server.engine.live


async def test_a_value_of_the_wrong_type_is_not_repeated() -> None:
    async with served() as server:
        path = await server.open()
        for answer in (
            await server.push(path, "hi", frame_index="secret"),
            await server.http.post(f"{path}/frame", json={"text": "hi", "frame_index": "secret"}),
            await server.http.post(SESSIONS, json={"system_prompt": ["secret"]}),
        ):
            assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid_fields")
            assert "secret" not in answer.text


# What a field can be that it may not be, with the words for it.
WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"text": None}, ["text: expected text, got null"]),
    ({"text": 5}, ["text: expected text, got 5"]),
    ({}, ["text: expected a value, got none"]),
    ({"text": "hi", "frame_index": 1.5}, ["frame_index: expected an integer, got 1.5"]),
    (
        {"text": "hi", "frame_index": 2**70},
        ["frame_index: expected at most 9007199254740991, got a number of more than 64"],
    ),
    (
        {"text": "hi", "stream": 1, "more": {}, "e": []},
        [
            "stream: expected true or false, got 1",
            "more: unknown; known here: text, frame_index, sampling, stream",
            "e: unknown; known here: text, frame_index, sampling, stream",
        ],
    ),
    ({"text": "hi", "sampling": []}, ["sampling: expected an object, got a list"]),
    (
        {"text": "hi", "sampling": {"top_p": {}, "seed": False, "stop_token_ids": 7}},
        [
            "sampling.top_p: expected a number, got an object",
            "sampling.seed: expected an integer, got false",
            "sampling.stop_token_ids: expected a list, got 7",
        ],
    ),
]


@pytest.mark.parametrize(("body", "reasons"), WRONG, ids=str)
async def test_a_422_says_what_was_expected_and_what_came_for_every_field(
    body: dict[str, Any], reasons: list[str]
) -> None:
    async with served() as server:
        path = await server.open()
        answer = await server.http.post(f"{path}/frame", json=body)
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["type"]) == (422, "invalid_fields", "PolicyUsageError")
        assert len(error["reasons"]) == len(reasons)
        for found, expected in zip(error["reasons"], reasons, strict=True):
            assert found.startswith(expected)
        assert error["message"] == "\n".join(error["reasons"])


def test_a_422_of_a_kind_that_is_not_known_has_pydantics_words() -> None:
    error = {"loc": ("a", 1), "type": "brand_new", "msg": "Input should be better", "input": "secret"}
    assert field_reason(error, ()) == "a.1: Input should be better"


@pytest.mark.parametrize(
    ("method", "path", "known"),
    [
        ("POST", "", "nothing"),
        ("GET", "/config", "nothing"),
        ("GET", "/one", "nothing"),
        ("DELETE", "/one", "nothing"),
        ("POST", "/one/frame", "frame_index, stream"),
        ("POST", "/one/frames", "frame_index, stream"),
    ],
)
async def test_an_unknown_query_key_is_refused_by_name(method: str, path: str, known: str) -> None:
    async with served() as server:
        one = await server.open()
        target = "/v1/streaming/config" if path == "/config" else SESSIONS + path.replace("/one", one[len(SESSIONS) :])
        options: dict[str, Any] = {"content": "hi", "headers": TEXT} if "frame" in path else {}
        answer = await server.http.request(method, target, params={"strem": "secret", "x" * 500: ""}, **options)
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (422, "invalid_fields")
        assert error["reasons"] == [f"query.{name}: unknown; known here: {known}" for name in ("strem", "x" * 40)]
        # Nothing was opened, pushed or closed.
        assert len(server.engine.sessions) == 1
        assert not server.engine.sessions[0].turns
        assert (await server.push(one, "hi", frame_index=0)).status_code == 200


async def test_an_unknown_query_key_comes_with_what_is_wrong_with_the_known_ones() -> None:
    async with served() as server:
        path = await server.open()
        query = {"frame_index": "-1", "stream": "maybe", "strem": "1"}
        answer = await server.http.post(f"{path}/frame", content="hi", headers=TEXT, params=query)
        assert error_of(answer)["reasons"] == [
            "query.frame_index: expected at least 0, got -1",
            "query.stream: expected true or false, got text",
            "query.strem: unknown; known here: frame_index, stream",
        ]


def test_reasons_of_the_library_name_the_fields_of_the_request() -> None:
    """Its arguments are called otherwise: ``sampling_params``, ``turn``."""
    said = [
        "sampling_params.n: expected 1, got 2",
        "max_tokens: a session needs a finite max_tokens, an integer >= 1, got None",
        "turn: expected at most 5 characters (more never fit), got 6 in sampling_params.n",
        "retention.total_tokens: expected less, got more",
    ]
    typed = [
        "sampling.n: expected 1, got 2",
        "sampling.max_tokens: a session needs a finite max_tokens, an integer >= 1, got None",
        "text: expected at most 5 characters (more never fit), got 6 in sampling_params.n",
        said[3],
    ]
    errors = (
        PolicyUsageError(said),
        SessionClosedError(said),
        ChunkRefusedError("unsupported_parameters", "\n".join(said)),
        SessionFailedError("grammar_failed", "\n".join(said)),
    )
    for error in errors:
        answer = api_error(error)
        assert answer is not None
        assert list(answer.reasons) == typed
        assert answer.message == "\n".join(typed)
    nothing_of_ours = PolicyUsageError("\u00e4: turned over")
    answer = api_error(nothing_of_ours)
    assert answer is not None
    assert answer.message == "\u00e4: turned over"


TWO_KEYS = [("X-Session-ID", "a"), ("X-Session-ID", "b")]
FORM_HEAD = {"Content-Type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    ("request_", "status", "code", "words"),
    [
        ({"content": "", "headers": TEXT}, 400, "empty_body", "got nothing"),
        ({"content": b"\xff", "headers": TEXT}, 400, "not_utf8", "body: expected UTF-8"),
        ({"content": "hi"}, 400, "bad_content_type", "got 'none'"),
        ({"content": "hi", "headers": {"Content-Type": "text/html"}}, 400, "bad_content_type", "got 'text/html'"),
        ({"content": "{", "headers": JSON}, 400, "bad_json", "expected JSON"),
        ({"json": {"text": ""}}, 422, "invalid_fields", "text: expected at least 1 character, got empty text"),
        (
            {"json": {"text": "hi", "frame_index": -1}},
            422,
            "invalid_fields",
            "frame_index: expected at least 0, got -1",
        ),
        (
            {"json": {"text": "hi", "frame_index": 2**53}},
            422,
            "invalid_fields",
            "frame_index: expected at most 9007199254740991, got 9007199254740992",
        ),
        (
            {"json": {"text": "hi", "frame_index": "0"}},
            422,
            "invalid_fields",
            "frame_index: expected an integer, got text",
        ),
        ({"json": {"text": "hi", "frame_index": 1}, "params": {"frame_index": 0}}, 400, "two_indices", "got 0 in"),
        (
            {"json": {"text": "hi"}, "params": {"frame_index": "x"}},
            422,
            "invalid_fields",
            "query.frame_index: expected an integer, got text",
        ),
        (
            {"json": {"text": "hi"}, "params": {"stream": "x"}},
            422,
            "invalid_fields",
            "query.stream: expected true or false, got text",
        ),
        ({"content": "no image", "headers": PNG}, 400, "bad_image", "expected a JPEG or PNG"),
        ({"content": image_bytes()[:40], "headers": PNG}, 400, "bad_image", "cannot be decoded"),
        ({"content": image_bytes(33, 33), "headers": PNG}, 413, "too_many_pixels", "got 33 x 33"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "bad_form", "boundary"),
        ({"content": b"x", "headers": FORM_HEAD}, 400, "bad_form", "Invalid multipart data"),
        ({"files": {"picture": image_bytes()}}, 400, "bad_form", "unknown field 'picture'"),
        ({"files": [("image", image_bytes())] * 2}, 400, "bad_form", "expected the field 'image' once"),
        ({"files": {"image": image_bytes()}, "data": {"sampling": "{"}}, 400, "bad_json", "expected JSON"),
        ({"files": {"image": image_bytes(), "text": b"\xff"}}, 400, "not_utf8", "text: expected UTF-8"),
        ({"files": {"image": b"nothing"}}, 400, "bad_image", "expected a JPEG or PNG"),
        ({"content": b"x" * 2000, "headers": TEXT}, 413, "body_too_large", "an announced length of 2000"),
        ({"content": "hi", "headers": {**TEXT, "X-Session-ID": "a b"}}, 400, "bad_routing_key", "X-Session-ID"),
        ({"content": "hi", "headers": {**TEXT, "X-Session-ID": "a" * 129}}, 400, "bad_routing_key", "129 characters"),
        ({"content": "hi", "headers": [*TEXT.items(), *TWO_KEYS]}, 400, "bad_routing_key", "got 2 of 1 characters"),
        ({"content": "hi", "headers": {**TEXT, "X-Session-ID": ""}}, 400, "bad_routing_key", "0 characters"),
    ],
)
async def test_what_cannot_be_pushed(request_: dict[str, Any], status: int, code: str, words: str) -> None:
    async with served(max_body_bytes=1500, max_frame_pixels=32 * 32) as server:
        path = await server.open()
        answer = await server.http.post(f"{path}/frame", **request_)
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (status, code)
        assert words in error["message"]
        # The session is as it was, and the next chunk gets the index.
        assert (await server.push(path, "hi", frame_index=0)).json()["frame_index"] == 0
        assert len(server.engine.sessions[0].turns) == 1


async def test_a_body_without_a_length_is_cut_off_at_the_cap() -> None:
    num_read = 0

    async def endless() -> Any:
        nonlocal num_read
        while True:
            num_read += 1
            yield b"x" * 100

    async with served(max_body_bytes=1000) as server:
        path = await server.open()
        answer = await server.http.post(f"{path}/frame", content=endless(), headers=TEXT)
        assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
        assert num_read == 11


async def test_unknown_and_malformed_ids_look_alike() -> None:
    async with served() as server:
        bodies = set()
        for name in ("0" * 32, "x", "%00", "ä", "a" * 5000, "%2e%2e"):
            for answer in (
                await server.http.get(f"{SESSIONS}/{name}"),
                await server.http.delete(f"{SESSIONS}/{name}"),
                await server.push(f"{SESSIONS}/{name}", "hi"),
            ):
                assert answer.status_code == 404
                bodies.add(answer.text)
        assert len(bodies) == 1


async def test_a_text_only_engine_says_so_and_names_its_model() -> None:
    async with served(FakeEngine(evolve(FACTS, takes_images=False))) as server:
        path = await server.open()
        answer = await server.http.post(f"{path}/frame", content=image_bytes(), headers=PNG)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "no_images")
        assert "fake-model takes text only" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("error", "ends", "status", "code", "kind"),
    [
        (ChunkRefusedError("chunk_too_long", "too long"), False, 413, "chunk_too_long", "ChunkRefusedError"),
        (ChunkRefusedError("no_room_now", "later"), False, 400, "no_room_now", "ChunkRefusedError"),
        (PolicyUsageError(["one", "two"]), False, 400, "invalid", "PolicyUsageError"),
        (CapacityError("full"), False, 503, "no_room", "CapacityError"),
        (PolicyUsageError(["not", "admitted"]), True, 400, "invalid", "PolicyUsageError"),
        (SessionClosedError("it was closed"), True, 409, "session_ended", "SessionClosedError"),
        (SessionFailedError("context_full", "it was full"), True, 409, "context_full", "SessionFailedError"),
    ],
)
async def test_what_the_engine_says_becomes_an_answer(
    error: Exception,
    ends: bool,  # noqa: FBT001 - a table
    status: int,
    code: str,
    kind: str,
) -> None:
    async with served() as server:
        path = await server.open()
        server.engine.script.append(error)
        server.engine.errors_end_sessions = ends
        answer = await server.push(path, "hi", frame_index=0)
        found = error_of(answer)
        assert (answer.status_code, found["code"], found["type"]) == (status, code, kind)
        again = await server.push(path, "hi", frame_index=0)
        if ends:
            ended = "ended_not_admitted" if kind == "PolicyUsageError" else "ended_failed"
            assert (again.status_code, error_of(again)["code"]) == (409, ended)
            assert found["reasons"][-1] in error_of(again)["message"]
        else:
            # A refused chunk has no index: the next one gets it.
            assert again.json()["frame_index"] == 0
            assert (await server.http.get(path)).json()["refused"] == 1


@pytest.mark.parametrize("kind", [RuntimeError, TimeoutError])
async def test_an_unexpected_error_is_a_500_without_its_text_and_ends_the_session(kind: type[Exception]) -> None:
    async with served() as server:
        path = await server.open()
        server.engine.script.append(kind("a secret"))
        answer = await server.push(path, "hi")
        assert (answer.status_code, error_of(answer)["code"]) == (500, "internal")
        assert kind.__name__ in answer.text
        assert "secret" not in answer.text
        later = await server.push(path, "hi")
        assert (later.status_code, error_of(later)["code"]) == (409, "ended_internal")
        assert server.engine.sessions[0].num_closes == 1


async def test_a_reply_that_cannot_be_answered_is_a_fault_of_ours_and_ends_the_session() -> None:
    async with served() as server:
        path = await server.open()
        server.engine.finish_reason = None
        answer = await asyncio.wait_for(server.push(path, "hi"), 5)
        assert (answer.status_code, error_of(answer)["code"]) == (500, "internal")
        later = await server.push(path, "hi")
        assert (later.status_code, error_of(later)["code"]) == (409, "ended_internal")
        assert server.engine.sessions[0].num_closes == 1


async def test_a_fault_in_the_handling_of_a_failure_reaches_the_client_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError

    async with served() as server:
        path = await server.open()
        server.engine.script.append(ChunkRefusedError("no_room_now", "later"))
        monkeypatch.setattr(SessionMetrics, "refused", broken)
        answer = await asyncio.wait_for(server.push(path, "hi"), 5)
        assert (answer.status_code, error_of(answer)["code"]) == (500, "internal")
        assert error_of(await server.push(path, "hi"))["code"] == "ended_internal"


async def test_an_unexpected_error_of_a_route_has_the_shape_too(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as server:

        def broken(**_: Any) -> Any:
            raise RuntimeError("a secret")

        server.engine.open_session = broken  # type: ignore[method-assign] # a fault that nothing else can cause
        answer = await server.http.post(SESSIONS, headers={"X-Session-ID": "k"})
        assert (answer.status_code, error_of(answer)["code"]) == (500, "internal")
        assert answer.headers["x-session-id"] == "k"
        assert "secret" not in answer.text
        assert "RuntimeError: a secret" in caplog.text


async def test_there_is_no_room_and_the_sum_is_in_the_message() -> None:
    async with served(FakeEngine(evolve(FACTS, num_pool_blocks=150)), idle_timeout_s=30) as server:
        path = await server.open(retention={"total_tokens": 1600})
        answer = await server.http.post(SESSIONS, json={"retention": {"total_tokens": 1024}})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "no_room")
        assert "may need 100 and this one 64, together 164, and the engine has 150" in error_of(answer)["message"]
        assert answer.headers["retry-after"] == "30"
        assert [session.num_closes for session in server.engine.sessions] == [0, 1]
        for passed_s, wait_s in ((28.5, "2"), (1.5, "1")):
            server.clock.now_s += passed_s
            answer = await server.http.post(SESSIONS, json={"retention": {"total_tokens": 1024}})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, wait_s)
        await server.http.delete(path)
        await server.open(retention={"total_tokens": 1024})


@pytest.mark.parametrize("num_sessions", [1, 2])
async def test_the_last_block_of_the_pool_can_be_promised(num_sessions: int) -> None:
    async with served(FakeEngine(evolve(FACTS, num_pool_blocks=64 * num_sessions))) as server:
        for _ in range(num_sessions):
            await server.open(retention={"total_tokens": 1024})
        answer = await server.http.post(SESSIONS, json={"retention": {"total_tokens": 1024}})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "no_room")


async def test_there_are_too_many_sessions() -> None:
    async with served(max_sessions=1) as server:
        await server.open(retention={"total_tokens": 1024})
        answer = await server.http.post(SESSIONS, json={"retention": {"total_tokens": 1024}})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "no_room")
        assert "1 are open and at most 1 may be" in error_of(answer)["message"]
        assert answer.headers["retry-after"] == "60"


def test_every_push_to_an_ended_session_is_told_whose_doing_the_end_was() -> None:
    by_client = {EndReason.CLIENT, EndReason.DISCONNECT, EndReason.IDLE, EndReason.NOT_ADMITTED}
    for reason in EndReason:
        kind = "SessionClosedError" if reason in by_client else "SessionFailedError"
        for error in (Ending(reason, ("why",)).error(), Ending(reason, ("why",)).pending_error()):
            assert (error.kind, error.code) == (kind, f"ended_{reason}")
            assert error.reasons == ("session: it has ended: why",)


MEGABYTE = 10**6
MANY_KEYS = {f"key{number}": number for number in range(MEGABYTE // 20)}


@pytest.mark.parametrize(
    "request_",
    [
        {"json": MANY_KEYS},
        {"json": {"retention": MANY_KEYS}},
        {"json": {"x" * MEGABYTE: 1}},
        {"json": {"retention": {"\u00e4\n\x01" * (MEGABYTE // 12): 1}}},
        {"json": {"model": "\x01" * (MEGABYTE // 6)}},
        {"json": {"model": "\U0001f600" * (MEGABYTE // 12), "retention": {"x": 1}}},
        {"json": {"sampling": {"stop_token_ids": ["x"] * (MEGABYTE // 5)}}},
        {"content": b"x", "headers": {"Content-Type": "x" * MEGABYTE}},
        {"content": b"x", "headers": JSON | {"Content-Length": "9" * MEGABYTE}},
        {"files": [("x" * 1000, b"x")] * 4},
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("is_push", [False, True])
async def test_the_answer_to_a_hostile_body_is_short(request_: dict[str, Any], *, is_push: bool) -> None:
    async with served() as server:
        path = await server.open(retention={"total_tokens": 1024})
        answer = await server.http.post(f"{path}/frame" if is_push else SESSIONS, **request_)
        assert 400 <= answer.status_code < 500
        assert len(answer.content) < 32 * 1024
        assert len(error_of(answer)["reasons"]) <= 20


def test_reasons_beyond_the_twentieth_are_counted() -> None:
    error = bad_request("invalid", [f"reason {number} {'x' * 400}" for number in range(25)])
    assert [reason[:9] for reason in error.reasons] == [f"reason {number} "[:9] for number in range(20)]
    assert {len(reason) for reason in error.reasons} == {300}
    assert error.message == "\n".join([*error.reasons, "and 5 more"])


@pytest.mark.parametrize("letter", ["\x01", "\n", "\u00e4", "\U0001f600"])
def test_a_reason_that_takes_many_bytes_is_cut_shorter(letter: str) -> None:
    [reason] = bad_request("invalid", letter * 1000).reasons
    assert len(json.dumps(reason, ensure_ascii=False).encode()) <= 602
    assert reason == letter * (len(reason) - 1) + "…"

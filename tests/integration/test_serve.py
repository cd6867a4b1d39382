"""``kvpolicy serve`` as it is run: the real server process on a loopback port, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvpolicy.adapters.vllm.v0_28.doctor import diagnose
from kvpolicy.adapters.vllm.v0_28.server import parsed, server_config
from kvpolicy.adapters.vllm.v0_28.server_guards import model_errors, process_errors
from kvpolicy.core.errors import PolicyUsageError
from tests.integration.server_process import COMMAND, ServerProcess, running, starting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

POLICY = '{"type": "randkv", "budget": 64, "buffer_size": 16}'
ROUTES = "/v1/streaming/"
RETENTION = {"total_tokens": 320, "min_total_tokens": 64}
DEADLINE_S = 12
LIMITS = ("--max-sessions", "3", "--session-top-p", "0.5", "--session-reply-deadline-s", str(DEADLINE_S))


@pytest.fixture(scope="module")
def streaming(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("streaming") / "log"
    with running(log, tiny_model, "--enable-streaming", "--api-key", "secret", *LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def policy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("policy") / "log"
    with running(log, tiny_model, "--kv-cache-policy", POLICY) as server:
        yield server


def client(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": "Bearer secret"}, timeout=60)


def paths(server: ServerProcess) -> list[str]:
    with client(server) as http:
        return list(http.get("/openapi.json").json()["paths"])


def completion(server: ServerProcess, model: Path, num_tokens: int = 5) -> dict[str, Any]:
    body = {"model": str(model), "prompt": [5] * 40, "max_tokens": num_tokens, "ignore_eos": True}
    with client(server) as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    value: dict[str, Any] = answer.json()
    return value


# The order counts: the last test of each server ends it.


def test_a_server_with_sessions_is_vllms_own_with_more_routes(streaming: ServerProcess, tiny_model: Path) -> None:
    with client(streaming) as http:
        assert http.get("/health").status_code == httpx.codes.OK
        [model] = http.get("/v1/models").json()["data"]
    assert model["id"] == str(tiny_model)
    assert model["max_model_len"] == 512
    assert completion(streaming, tiny_model)["usage"]["completion_tokens"] == 5
    assert any(path.startswith(ROUTES) for path in paths(streaming))


def test_the_api_key_covers_the_session_routes(streaming: ServerProcess) -> None:
    for path in ("/v1/models", ROUTES + "sessions"):
        assert httpx.post(streaming.url + path, timeout=60).status_code == httpx.codes.UNAUTHORIZED


def test_what_is_no_route_is_answered_by_the_servers_own_router(streaming: ServerProcess) -> None:
    with client(streaming) as http:
        for method, path, status in (("GET", "nothing", 404), ("PUT", "config", 405)):
            answer = http.request(method, ROUTES + path)
            assert (answer.status_code, list(answer.json())) == (status, ["detail"]), answer.text


def test_the_limits_of_the_command_line_are_those_of_the_server(streaming: ServerProcess) -> None:
    with client(streaming) as http:
        config = http.get(ROUTES + "config").json()
        assert (config["limits"]["max_sessions"], config["limits"]["reply_deadline_s"]) == (3, DEADLINE_S)
        assert (config["sampling"]["top_p"], config["sampling"]["max_tokens"]) == (0.5, 24)
        sessions = [opened(http) for _ in range(3)]
        more = http.post(ROUTES + "sessions", json={"retention": RETENTION})
        assert (more.status_code, more.json()["error"]["code"]) == (503, "no_room"), more.text
        for session in sessions:
            assert http.delete(f"{ROUTES}sessions/{session}").json()["closed"] is True


def opened(http: httpx.Client, max_tokens: int = 24) -> str:
    body = {
        "system_prompt": "You watch a log.",
        "retention": RETENTION,
        "sampling": {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True},
    }
    answer = http.post(ROUTES + "sessions", json=body)
    assert answer.status_code == httpx.codes.CREATED, answer.text
    return str(answer.json()["session_id"])


def pushed(http: httpx.Client, session: str, text: str) -> httpx.Response:
    return http.post(f"{ROUTES}sessions/{session}/frame", content=text, headers={"Content-Type": "text/plain"})


def ended_push(server: ServerProcess, end: Callable[[], None]) -> httpx.Response:
    """Return the answer to a push that is pending when the server's engine is ended."""
    with client(server) as http, ThreadPoolExecutor() as threads:
        session = opened(http, 180)
        assert pushed(http, session, "hello").status_code == httpx.codes.OK
        # Without an engine that goes on, no reply can come before the end does.
        with server.standing_still():
            push = threads.submit(pushed, http, session, "hello again")
            while http.get(f"{ROUTES}sessions/{session}").json()["state"] != "pending":
                assert not push.done(), push.result().text
            end()
            return push.result(60)


def test_a_session_is_bounded_and_goes_with_ordinary_traffic(streaming: ServerProcess, tiny_model: Path) -> None:
    with client(streaming) as http:
        session = opened(http)
        replies = []
        for i in range(30):
            answer = pushed(http, session, f"line {i}: the pump is running")
            assert answer.status_code == httpx.codes.OK, answer.text
            replies.append(answer.json())
            if i % 10 == 0:
                completion(streaming, tiny_model)
        assert [reply["frame_index"] for reply in replies] == list(range(30))
        assert sum(reply["evicted_tokens"] for reply in replies) > 0
        assert max(reply["blocks"] for reply in replies) <= 21
        assert http.delete(f"{ROUTES}sessions/{session}").status_code == httpx.codes.OK
    # Whoever knows an id can use the session; logs are read by many.
    assert session not in streaming.text()
    assert session[:8] in streaming.text()


def test_a_chunk_that_does_not_fit_costs_itself_only_be_it_the_first_one(streaming: ServerProcess) -> None:
    with client(streaming) as http:
        session = opened(http, 9)
        frame = f"{ROUTES}sessions/{session}/frame"
        for index in range(2):
            for body in ({"text": "long " * 80}, {"text": "hi", "sampling": {"max_tokens": 310}}):
                answer = http.post(frame, json={**body, "frame_index": index})
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "chunk_too_long"), answer.text
                assert "max_tokens" in answer.json()["error"]["message"]
            answer = http.post(frame, json={"text": "hello", "frame_index": index})
            assert (answer.status_code, answer.json()["frame_index"]) == (200, index), answer.text
        status = http.get(f"{ROUTES}sessions/{session}").json()
        assert (status["state"], status["frames"], status["refused"]) == ("idle", 2, 4)
        http.delete(f"{ROUTES}sessions/{session}")


HOSTILE = (
    '{"temperature": NaN}',
    '{"temperature": 1e999}',
    '{"temperature": -1}',
    '{"temperature": "hot"}',
    '{"top_p": 0}',
    f'{{"top_k": {1 << 70}}}',
    f'{{"seed": {1 << 64}}}',
    '{"max_tokens": 0}',
    f'{{"max_tokens": {1 << 63}}}',
    '{"max_tokens": null}',
    f'{{"min_tokens": {1 << 40}}}',
    '{"repetition_penalty": 0}',
    '{"n": 100000}',
    '{"stop": ["a"]}',
    '{"stop_token_ids": [-1]}',
    '{"stop_token_ids": [99999999]}',
    '{"logit_bias": {"99999999": 5}}',
    '{"logit_bias": {"3": Infinity}}',
    '{"logit_bias": {"x": 1}}',
    '{"logprobs": 1000000000}',
    '{"prompt_logprobs": 5}',
    '{"bad_words": ["", "\\u0000"]}',
    '{"allowed_token_ids": [99999999]}',
    '{"structured_outputs": {"regex": "("}}',
    '{"structured_outputs": {"json": "{"}}',
    '{"extra_args": {"kv_cache_policy": "randkv"}}',
    '{"output_kind": 2, "_eos_token_id": 3}',
    '{"logit_bias": ' + '{"a":' * 5000 + "1" + "}" * 5001,
)


def test_no_sampling_parameters_harm_the_server(streaming: ServerProcess, tiny_model: Path) -> None:
    """They come with a session or with a chunk; some can be had, and none is a fault of ours or the engine's end."""
    as_json = {"Content-Type": "application/json"}
    statuses: dict[str, set[int]] = {}
    with client(streaming) as http:
        for sampling in HOSTILE:
            session = opened(http)
            frame = f"{ROUTES}sessions/{session}/frame"
            answers = [
                http.post(frame, content=f'{{"text": "hi", "sampling": {sampling}}}', headers=as_json),
                http.post(
                    ROUTES + "sessions",
                    content=f'{{"retention": {json.dumps(RETENTION)}, "sampling": {sampling}}}',
                    headers=as_json,
                ),
            ]
            if answers[1].status_code == httpx.codes.CREATED:
                other = answers[1].json()["session_id"]
                answers.append(pushed(http, other, "hi"))
                http.delete(f"{ROUTES}sessions/{other}")
            http.delete(f"{ROUTES}sessions/{session}")
            statuses[sampling[:80]] = {answer.status_code for answer in answers}
        assert {status for found in statuses.values() for status in found} <= {200, 201, 400, 409, 413, 422}, statuses
        assert sum(400 in found or 422 in found for found in statuses.values()) > 20, statuses
        assert http.get("/health").status_code == httpx.codes.OK
        session = opened(http)
        assert pushed(http, session, "hello").status_code == httpx.codes.OK
        http.delete(f"{ROUTES}sessions/{session}")
    completion(streaming, tiny_model)


def test_a_prompt_of_ids_that_the_model_does_not_have_is_a_mistake_of_the_client(
    streaming: ServerProcess, tiny_model: Path
) -> None:
    with client(streaming) as http:
        for prompt in ([5, 320], [[5, 6], [320]]):
            body = {"model": str(tiny_model), "prompt": prompt, "max_tokens": 4}
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
            assert "prompt: expected token ids from 0 to 319" in answer.json()["error"]["message"]
    completion(streaming, tiny_model)


def test_a_reply_that_takes_too_long_ends_its_session_and_gives_its_blocks_back(
    streaming: ServerProcess, tiny_model: Path
) -> None:
    [engine] = streaming.engines()
    with client(streaming) as http:
        session = opened(http, 180)
        assert pushed(http, session, "hello").status_code == httpx.codes.OK
        engine.suspend()
        try:
            late = pushed(http, session, "hello again")
        finally:
            engine.resume()
        assert (late.status_code, late.json()["error"]["code"]) == (503, "ended_reply_deadline"), late.text
        after = pushed(http, session, "and now?")
        assert (after.status_code, after.json()["error"]["code"]) == (409, "ended_reply_deadline"), after.text
        assert http.get("/health").status_code == httpx.codes.OK
        deadline_s = time.monotonic() + 60
        while value(http, "kvpolicy:session_open{"):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        # The engine shows what it uses as of its last step, so it has to take one.
        completion(streaming, tiny_model)
        assert value(http, "vllm:kv_cache_usage_perc{") == 0


def value(http: httpx.Client, name: str) -> float:
    """Return the sum of the samples of ``/metrics`` that begin like this."""
    found = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
    assert found, name
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_without_flags_of_ours_it_is_the_stock_server(tiny_model: Path, tmp_path: Path) -> None:
    """Also on the CPU build, where vLLM's own command does not start."""
    with running(tmp_path / "log", tiny_model) as server:
        assert completion(server, tiny_model)["usage"]["completion_tokens"] == 5
        assert not [path for path in paths(server) if "streaming" in path]
        for path in (ROUTES + "sessions", ROUTES + "config", "/streaming/console"):
            assert httpx.get(server.url + path, timeout=60).status_code == httpx.codes.NOT_FOUND
        assert "kvpolicy.adapters" not in server.text()
        server.process.send_signal(signal.SIGTERM)
        server.wait_until_gone()


def test_a_signal_ends_it_cleanly_and_a_pending_push_is_answered(streaming: ServerProcess) -> None:
    streaming.children()
    answer = ended_push(streaming, lambda: streaming.process.send_signal(signal.SIGTERM))
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, answer.text
    assert "shutting down" in answer.text
    assert streaming.wait_until_gone() == 0, streaming.text()


@pytest.fixture
def doomed(tiny_model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with running(tmp_path / "log", tiny_model, "--enable-streaming") as server:
        yield server


def test_everything_under_way_ends_with_an_error_when_the_engine_is_killed(
    doomed: ServerProcess, tiny_model: Path
) -> None:
    [engine] = doomed.engines()
    body = {"model": str(tiny_model), "prompt": [5] * 40, "max_tokens": 450, "ignore_eos": True}
    with client(doomed) as http, ThreadPoolExecutor() as threads:
        plain, streamed, idle = (opened(http, 180) for _ in range(3))
        assert pushed(http, idle, "hello").status_code == httpx.codes.OK
        with http.stream("POST", f"{ROUTES}sessions/{streamed}/frame", json={"text": "hi", "stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith('data: {"text":')
            # Whatever is sent from here on stays under way, however slow this process is.
            engine.suspend()
            ordinary = threads.submit(http.post, "/v1/completions", json=body)
            push = threads.submit(pushed, http, plain, "hello")
            while http.get(f"{ROUTES}sessions/{plain}").json()["state"] != "pending":
                assert not push.done()
            engine.kill()
            killed_s = time.monotonic()
            rest = list(lines)
        answer = push.result(60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ended_engine"), answer.text
        assert "event: error" in rest
        assert '"ended_engine"' in rest[rest.index("event: error") + 1]
        assert ordinary.result(60).status_code == httpx.codes.INTERNAL_SERVER_ERROR
        # The server is on its way out, or gone already.
        with contextlib.suppress(httpx.TransportError):
            late = pushed(http, idle, "hello again")
            assert (late.status_code, late.json()["error"]["code"]) == (503, "ended_engine"), late.text
        assert time.monotonic() - killed_s < 60
    assert doomed.wait_until_gone() == 1, doomed.text()


def test_sessions_live_on_two_data_parallel_engines(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--enable-streaming", "--data-parallel-size", "2")
    with (
        running(tmp_path / "log", tiny_model, *flags) as server,
        client(server) as http,
        ThreadPoolExecutor() as threads,
    ):
        sessions = [opened(http, 9) for _ in range(4)]
        for i in range(10):
            answers = list(threads.map(partial(pushed, http, text=f"line {i}: the pump is running"), sessions))
            assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
            # All four hold the same, wherever they are.
            assert len({answer.json()["text"] for answer in answers}) == 1
        for session in sessions:
            status = http.get(f"{ROUTES}sessions/{session}").json()
            assert status["frames"] == 10
            assert status["evictions"] > 0
            assert status["blocks"] <= status["max_blocks"]
        for rank in range(2):
            assert value(http, f'vllm:prompt_tokens_total{{engine="{rank}"') > 0
        for session in sessions:
            assert http.delete(f"{ROUTES}sessions/{session}").json()["closed"] is True
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_until_gone() == 0, server.text()


def test_a_server_with_a_policy_only_has_no_session_route(policy: ServerProcess, tiny_model: Path) -> None:
    assert not any(path.startswith(ROUTES) for path in paths(policy))
    with client(policy) as http:
        for method in ("GET", "POST", "DELETE"):
            assert http.request(method, ROUTES + "sessions").status_code == httpx.codes.NOT_FOUND
    assert completion(policy, tiny_model, 200)["usage"]["completion_tokens"] == 200
    with client(policy) as http:
        metrics = http.get("/metrics").text
    events = [line for line in metrics.splitlines() if line.startswith("kvpolicy:compaction_events_total{")]
    assert len(events) == 1
    assert float(events[0].rpartition(" ")[2]) > 5


def test_the_server_ends_with_an_error_when_its_engine_has_died(policy: ServerProcess) -> None:
    [engine] = policy.engines()
    started_s = time.monotonic()
    engine.kill()
    assert policy.wait_until_gone() == 1, policy.text()
    assert time.monotonic() - started_s < 60


def test_a_signal_ends_a_server_that_is_still_starting(tiny_model: Path, tmp_path: Path) -> None:
    with starting(tmp_path / "log", tiny_model, "--enable-streaming") as server:
        while not server.engines():
            assert server.process.poll() is None, server.text()
            time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_until_gone() == 128 + signal.SIGTERM, server.text()


def test_a_port_that_is_taken_is_a_users_error(tiny_model: Path) -> None:
    flags = "--enable-streaming --max-num-seqs 8 --max-model-len 512 --host 127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*COMMAND, "serve", str(tiny_model), *flags.split(), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)  # noqa: S603 - ours
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"kvpolicy serve: --port {port}: Address already in use; choose another" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_user_error_shows_all_reasons_and_loads_nothing(tiny_model: Path) -> None:
    flags = "--api-server-count 2 --max-num-seqs 1 --kv-cache-policy nonsense --enable-streaming --max-model-len 512"
    command = [*COMMAND, "serve", str(tiny_model), *flags.split()]
    done = subprocess.run(  # noqa: S603 - ours
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ}
    )
    assert done.returncode == 2, done.stdout + done.stderr
    for what in ("--api-server-count 2", "--max-num-seqs 1", "nonsense"):
        assert what in done.stderr
    assert "Traceback" not in done.stderr
    assert "Loading" not in done.stdout


def refused(*flags: str) -> str:
    with pytest.raises(PolicyUsageError) as caught:
        server_config(*parsed(flags))
    return str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--api-server-count 3",
        "--api-server-count 0",
        "--headless",
        "--grpc",
        "--data-parallel-multi-port-external-lb",
        "--pipeline-parallel-size 2",
        "--data-parallel-size 2 --kv-cache-policy randkv",
        "--async-scheduling",
        "--max-sessions 9",
    ],
)
def test_each_guard_names_its_flag(tiny_model: Path, flags: str) -> None:
    usual = "--enable-streaming --max-model-len 512 --max-num-seqs 8"
    said = refused(str(tiny_model), *usual.split(), *flags.split())
    assert any(reason.startswith(flags.split(maxsplit=1)[0]) for reason in said.splitlines()), said


CONNECTOR = '{"kv_connector":"ExampleConnector","kv_role":"kv_both"}'
# Flags that are refused at different stages, with what is said of each: R.28's own, and those that kvpolicy sets.
TOGETHER = (
    (
        "--async-scheduling --pipeline-parallel-size 2 --max-num-seqs 1 --api-server-count 3",
        ("--async-scheduling:", "--pipeline-parallel-size 2:", "--max-num-seqs 1:", "--api-server-count 3:"),
    ),
    (
        "--scheduler-cls x --prefix-match-unit 8 --block-size 16 --kv-cache-policy nonsense --kv-transfer-config "
        + CONNECTOR,
        ("--scheduler-cls:", "--prefix-match-unit:", "--kv-transfer-config:", "--kv-cache-policy: unknown name"),
    ),
)


@pytest.mark.parametrize(("flags", "expected"), TOGETHER)
def test_all_reasons_come_at_once_and_name_the_flag_as_typed(
    tiny_model: Path, flags: str, expected: tuple[str, ...]
) -> None:
    line = (str(tiny_model), "--enable-streaming", "--max-model-len", "512", *flags.split())
    said = refused(*line).splitlines()
    for flag in expected:
        assert [reason for reason in said if reason.startswith(flag)], said
    sessions, policies = (verdict.reasons for verdict in diagnose(line).verdicts)
    assert {*sessions, *policies} >= {*said}


def test_what_vllm_refuses_hides_no_reason_of_ours(tiny_model: Path) -> None:
    flags = "--enable-streaming --max-model-len -5 --async-scheduling --kv-cache-policy nonsense --headless"
    line = (str(tiny_model), *flags.split())
    said = refused(*line)
    for part in ("engine configuration:", "--async-scheduling:", "--kv-cache-policy: unknown name", "--headless:"):
        assert part in said
    sessions, policies = (verdict.reasons for verdict in diagnose(line).verdicts)
    assert {*"\n".join((*sessions, *policies)).splitlines()} == {*said.splitlines()}


def test_a_wrong_flag_of_ours_hides_no_reason_of_the_engine(tiny_model: Path) -> None:
    flags = "--enable-streaming --session-idle-timeout-s 0 --max-sessions 9 --max-num-seqs 8 --pipeline-parallel-size 2"
    said = refused(str(tiny_model), "--max-model-len", "512", *flags.split(), "--api-server-count", "2")
    for part in ("--session-idle-timeout-s", "--max-sessions", "--pipeline-parallel-size 2", "--api-server-count 2"):
        assert part in said
    said = refused(str(tiny_model), "--kv-cache-policy", "randkv", "--session-top-p", "0.5", "--async-scheduling")
    assert "--session-top-p" in said
    assert "--async-scheduling" in said


@pytest.mark.parametrize(
    ("flags", "size"), [("", None), ("--mm-processor-cache-gb 4", 4), ("--mm_processor_cache_gb=2", 2)]
)
def test_the_processor_cache_is_off_unless_it_was_asked_for(tiny_model: Path, flags: str, size: float | None) -> None:
    """Whether it can be is the model's matter: see ``model_errors``."""
    line = (str(tiny_model), "--enable-streaming", "--max-model-len", "512", "--max-num-seqs", "8", *flags.split())
    args, options, reasons = parsed(line)
    assert args.mm_processor_cache_gb == size
    server_config(args, options, reasons)
    assert args.mm_processor_cache_gb == (size or 0)


def test_each_guard_of_the_process_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"api_server_count": None, "headless": False, "grpc": False, "data_parallel_multi_port_external_lb": False}
    assert list(process_errors(Namespace(**usual))) == []
    [reason] = process_errors(Namespace(**usual | {"data_parallel_multi_port_external_lb": True}))
    assert reason.startswith("--data-parallel-multi-port-external-lb: ")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert list(process_errors(Namespace(**usual))) == ["VLLM_USE_RUST_FRONTEND: not supported; unset it"]


PLAIN_MODEL: dict[str, Any] = {
    "model": "m",
    "runner_type": "generate",
    "is_multimodal_model": False,
    "hf_text_config": SimpleNamespace(layer_types=["full_attention"] * 2),
    "is_hybrid": False,
    "is_attention_free": False,
    "use_mla": False,
    "is_encoder_decoder": False,
    "get_sliding_window": lambda: None,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runner_type": "pooling"}, "generates text, got one for pooling"),
        (
            {"is_multimodal_model": True, "multimodal_config": SimpleNamespace(mm_processor_cache_gb=4)},
            "--mm-processor-cache-gb 4: must be 0",
        ),
        ({"is_hybrid": True}, "a hybrid model"),
        ({"is_attention_free": True}, "no attention"),
        ({"use_mla": True}, "multi-head latent attention"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"get_sliding_window": lambda: 64}, "a sliding window of 64"),
        ({"hf_text_config": SimpleNamespace(layer_types=["full_attention", "other"])}, "layers of several kinds"),
        ({"hf_text_config": SimpleNamespace(attention_chunk_size=8)}, "attention in chunks"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_guard_of_the_model_is_a_reason(changes: dict[str, Any], words: str) -> None:
    def config(**attributes: Any) -> Any:
        return SimpleNamespace(model_config=SimpleNamespace(**attributes))

    assert list(model_errors(config(**PLAIN_MODEL))) == []
    [reason] = model_errors(config(**PLAIN_MODEL | changes))
    assert words in reason


def test_a_model_that_is_not_there_is_a_users_error_beside_the_others(tmp_path: Path) -> None:
    said = refused(str(tmp_path / "nowhere"), "--enable-streaming", "--headless")
    assert "nowhere" in said
    assert "--headless" in said

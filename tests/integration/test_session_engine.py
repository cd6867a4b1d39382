"""Our engine behind the HTTP frontend's port, and the endpoint plugin of vLLM that uses it."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm.plugins import ENDPOINT_PLUGINS_GROUP, load_endpoint_plugins
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from kvpolicy.adapters.vllm import AsyncLLM, ChatFormat
from kvpolicy.adapters.vllm.shared.messages import RETENTION_KEY
from kvpolicy.adapters.vllm.shared.sampling import sampling_params_from
from kvpolicy.adapters.vllm.shared.turns import TurnEncoder
from kvpolicy.adapters.vllm.v0_28.server.process import PLUGIN_MARK
from kvpolicy.adapters.vllm.v0_28.server.session_engine import SessionEngine, awaited_from_elsewhere
from kvpolicy.core.errors import ChunkRefusedError, PolicyUsageError, SessionClosedError
from kvpolicy.core.session_port import ImageTurn
from kvpolicy.serving import endpoint_plugin
from tests.chat_templates import GEMMA
from tests.integration.live import engine_options
from tests.models import CHAT_TEMPLATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvpolicy.adapters.vllm.v0_28.server.session_engine import OpenSession

WINDOW = {"total_tokens": 256, "min_total_tokens": 64}
CHAT_FLAGS: dict[str, Any] = {
    "chat_template": None,
    "chat_template_content_format": "auto",
    "default_chat_template_kwargs": None,
    "reasoning_parser": "",
    "structured_outputs_config": SimpleNamespace(reasoning_parser=""),
    "reasoning_config": None,
    "tokens_only": False,
    "override_generation_config": {},
    "generation_config": "auto",
}


@pytest.fixture(scope="module")
def started(runner: asyncio.Runner, tiny_model: Path) -> Iterator[AsyncLLM]:
    async def start() -> AsyncLLM:
        return AsyncLLM(**engine_options(tiny_model, served_model_name="tiny"))

    engine = runner.run(start())
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(started: AsyncLLM) -> SessionEngine:
    return SessionEngine(started)


async def opened(
    engine: SessionEngine,
    *,
    retention: dict[str, Any] | None = WINDOW,
    sampling: dict[str, Any] | None = None,
    system_prompt: str | None = None,
) -> OpenSession:
    return await engine.open_session(
        system_prompt=system_prompt, retention=retention, sampling=sampling or {}, priority=0
    )


def test_the_facts_are_the_engines(engine: SessionEngine) -> None:
    facts = engine.facts()
    assert facts.model == "tiny"
    assert (facts.block_size, facts.context_limit, facts.trained_range) == (16, 512, 2048)
    assert facts.num_pool_blocks == 199
    assert facts.max_sessions == 7
    assert facts.takes_images is False
    assert engine.failure() is None


def test_the_server_may_know_more_names_of_the_model(started: AsyncLLM) -> None:
    assert SessionEngine(started, ["tiny", "small"]).facts().model_names == ("tiny", "small")


def test_a_session_stays_within_the_blocks_that_it_said(engine: SessionEngine, runner: asyncio.Runner) -> None:
    async def use() -> None:
        session = await opened(engine, sampling={"max_tokens": 9, "ignore_eos": True}, system_prompt="You watch a log.")
        assert session.max_blocks == 17
        pieces: list[str] = []
        for i in range(30):
            reply = await session.push(f"line {i}: the pump is running", on_text=pieces.append)
            assert reply.num_blocks <= session.max_blocks
            assert len(reply.token_ids) == 9
        assert session.stats().num_evictions > 0
        assert pieces
        short = await session.push("and now?", sampling={"max_tokens": 2, "ignore_eos": True})
        assert len(short.token_ids) == 2
        with pytest.raises(ChunkRefusedError):
            await session.push("long " * 100)
        with pytest.raises(PolicyUsageError, match="takes text only"):
            await session.push(ImageTurn(image=object()))
        with pytest.raises(PolicyUsageError, match=r"sampling\.temperature"):
            await session.push("x", sampling={"temperature": "hot"})
        had_ended = session.has_ended
        await session.close()
        assert (had_ended, session.has_ended) == (False, True)
        with pytest.raises(SessionClosedError):
            await session.push("x")

    runner.run(use())


def test_without_retention_the_context_bounds_it(engine: SessionEngine, runner: asyncio.Runner) -> None:
    session = runner.run(opened(engine, retention=None))
    assert (session.max_blocks, session.retention) == (512 // 16, None)


def test_a_session_says_which_budgets_the_engine_uses(engine: SessionEngine, runner: asyncio.Runner) -> None:
    session = runner.run(opened(engine, retention={"min_total_tokens": 64}, sampling={"max_tokens": 9}))
    assert session.retention is not None
    # floor(0.7 * 512) - 9 - 2 * 16, the context limit's share
    assert (session.retention["total_tokens"], session.retention["content_segments"]) == (317, 30)
    assert session._session._params.extra_args == {RETENTION_KEY: session.retention}


def test_what_cannot_be_is_refused_at_once_with_every_reason(
    engine: SessionEngine, started: AsyncLLM, runner: asyncio.Runner
) -> None:
    def reasons(**wanted: Any) -> tuple[str, ...]:
        with pytest.raises(PolicyUsageError) as caught:
            runner.run(opened(engine, **wanted))
        return caught.value.reasons

    text = "\n".join(
        reasons(
            retention={"total_tokens": 4000, "nonsense": 1},
            sampling={"temperature": "hot", "heat": 1, "seed": 1 << 70},
        )
    )
    for part in ("nonsense", "sampling.temperature", "sampling.heat", "sampling.seed"):
        assert part in text
    assert len(reasons(retention={"total_tokens": 4000})) == 3  # context limit, trained range, pool
    assert any("first chunk" in reason for reason in reasons(system_prompt="word " * 300))
    assert len(reasons(retention={"total_tokens": 4000}, sampling={"stop": ["x"], "prompt_logprobs": 1})) == 5
    assert any("max_tokens" in reason for reason in reasons(sampling={"max_tokens": 300}))
    wrong: Any = "high"
    with pytest.raises(PolicyUsageError, match="priority"):
        runner.run(engine.open_session(system_prompt=None, retention=WINDOW, sampling={}, priority=wrong))
    assert not started.output_processor.request_states


def test_replies_are_greedy_and_short_unless_something_else_is_asked_for(engine: SessionEngine) -> None:
    params = engine.sampling_params({})
    assert (params.temperature, params.max_tokens) == (0.0, 24)


def test_a_chat_template_that_cannot_be_is_a_reason_among_others(started: AsyncLLM, runner: asyncio.Runner) -> None:
    forgetful = SessionEngine(started, chat_format=ChatFormat(template="{{ messages[-1].content }}"))
    for retention in (WINDOW, None):
        with pytest.raises(PolicyUsageError) as caught:
            runner.run(opened(forgetful, retention=retention, sampling={"heat": 1} if retention else {}))
        assert any(reason.startswith("chat template: earlier replies") for reason in caught.value.reasons)
        assert any(reason.startswith("sampling.heat") for reason in caught.value.reasons) == (retention is not None)
    gemma = SessionEngine(started, chat_format=ChatFormat(template=GEMMA))
    with pytest.raises(PolicyUsageError, match="chat template: System role not supported"):
        runner.run(opened(gemma, system_prompt="You watch a log."))
    assert runner.run(opened(gemma)).has_ended is False
    with pytest.raises(PolicyUsageError, match="chat template: System role not supported"):
        started.open_session(system_prompt="You watch a log.", chat_format=ChatFormat(template=GEMMA))


def test_what_a_template_raises_for_one_text_costs_that_push(started: AsyncLLM, runner: asyncio.Runner) -> None:
    rude = "{% for m in messages %}{% if 'rude' in m.content %}{{ raise_exception('be kind') }}{% endif %}{% endfor %}"
    engine = SessionEngine(started, chat_format=ChatFormat(template=rude + CHAT_TEMPLATE))

    async def use() -> None:
        session = await opened(engine, sampling={"max_tokens": 9, "ignore_eos": True})
        for i in range(12):
            with pytest.raises(PolicyUsageError, match="chat template: be kind"):
                await session.push("a rude line")
            assert len((await session.push(f"line {i}: the pump is running")).token_ids) == 9
        assert session.stats().num_evictions > 0
        await session.close()

    runner.run(use())


def test_a_reply_ends_at_every_token_that_the_generation_configuration_names(
    started: AsyncLLM, engine: SessionEngine, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a chat's does: many models have several, and the tokenizer names only one of them."""

    async def replies(num_turns: int) -> list[Any]:
        session = await opened(engine, sampling={"max_tokens": 9}, retention={**WINDOW, "total_tokens": 128})
        found = [await session.push(f"line {i}: the pump is running") for i in range(num_turns)]
        assert num_turns == 1 or session.stats().num_evictions > 0
        await session.close()
        return found

    [whole] = runner.run(replies(1))
    first = whole.token_ids[0]
    assert (len(whole.token_ids), whole.finish_reason) == (9, "length")
    eos = started.input_processor.generation_config_fields["eos_token_id"]
    monkeypatch.setitem(started.input_processor.generation_config_fields, "eos_token_id", [eos, first])
    found = runner.run(replies(12))
    assert (found[0].finish_reason, found[0].stop_reason, found[0].token_ids) == ("stop", first, (first,))
    assert all(first not in reply.token_ids[:-1] for reply in found)


def slowly(tokens: list[list[int]], ticks: list[int], encode: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Return what encodes like a tokenizer that needs as long as six ticks of the loop, and keep what it returned."""

    def encode_slowly(encoder: TurnEncoder, text: str) -> list[int]:
        enough, deadline_s = len(ticks) + 6, time.monotonic() + 20
        while len(ticks) < enough:
            assert time.monotonic() < deadline_s, "the loop stands still"
            time.sleep(0.01)
        tokens.append(encode(encoder, text))
        return tokens[-1]

    return encode_slowly


def test_the_loop_goes_on_while_a_long_system_prompt_is_encoded(
    engine: SessionEngine, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[list[int]] = []
    ticks: list[int] = []
    monkeypatch.setattr(TurnEncoder, "encode", slowly(encoded, ticks, TurnEncoder.encode))

    async def tick() -> None:
        while True:
            ticks.append(len(encoded))
            await asyncio.sleep(0.01)

    async def use(system_prompt: str, total: int) -> None:
        ticker = asyncio.create_task(tick())
        try:
            # Too long for the budget, which only its tokens show; and a session that opens and is pushed to.
            with pytest.raises(PolicyUsageError, match="first chunk"):
                await opened(engine, system_prompt=system_prompt, retention={**WINDOW, "total_tokens": total})
            session = await opened(engine, system_prompt=system_prompt, retention=None)
            with pytest.raises(ChunkRefusedError, match="chunk_too_long"):
                await session.push("hello")
            await session.close()
        finally:
            ticker.cancel()

    runner.run(use("x" * 4500, 480))
    assert [len(tokens) > 4000 for tokens in encoded] == [True, True]
    assert ticks.count(0) > 5
    assert ticks.count(1) > 5


def test_a_system_prompt_that_never_fits_is_refused_by_its_characters(
    engine: SessionEngine, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By those of the budget, before any of it is made into tokens, and with every other reason."""

    def encode(*_: object, **__: object) -> None:
        raise AssertionError("it was made into tokens")

    monkeypatch.setattr(engine._engine._turn_tokenizer, "encode", encode)
    with pytest.raises(PolicyUsageError) as caught:
        runner.run(opened(engine, system_prompt="x" * 4500, sampling={"heat": 1}))
    assert [reason.split(":")[0] for reason in caught.value.reasons] == ["sampling.heat", "system_prompt"]
    assert "got 4500" in caught.value.reasons[1]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ('{"temperature": NaN}', "finite"),
        ('{"logit_bias": {"3": Infinity}}', "finite"),
        ('{"top_k": 1.5}', "int"),
        ('{"max_tokens": true}', "int"),
        ('{"stop_token_ids": [320]}', "from 0 to 319"),
        ('{"stop_token_ids": [-1]}', "from 0 to 319"),
        ('{"stop_token_ids": [99999999999999999999]}', "64 bits"),
        ('{"top_p": 7}', "top_p"),
        ('{"output_kind": 1}', "unknown field"),
        ('{"extra_args": {"streaming_retention": {}}}', "unknown field"),
        ('{"_eos_token_id": 3}', "unknown field"),
    ],
)
def test_sampling_that_anybody_may_send(engine: SessionEngine, value: str, reason: str) -> None:
    with pytest.raises(PolicyUsageError, match=reason):
        engine.sampling_params(json.loads(value))


def test_an_unknown_sampling_field_is_told_where_all_of_them_are(engine: SessionEngine) -> None:
    def reasons(name: str) -> tuple[str, ...]:
        with pytest.raises(PolicyUsageError) as caught:
            sampling_params_from({name: object()}, defaults={})
        return caught.value.reasons

    [reason] = reasons("heat")
    assert reason.startswith("sampling.heat: unknown field; sampling_fields of GET /v1/streaming/config")
    # What is longer is cut on its way to a client.
    assert len(reason) < 300
    known = engine.facts().sampling_fields
    assert {"temperature", "logit_bias", "structured_outputs"} <= set(known)
    for name in known:
        assert "unknown" not in reasons(name)[0]


def test_sampling_from_json() -> None:
    given = {"temperature": 1, "logit_bias": {"3": 2}, "stop_token_ids": [7], "seed": None}
    params = sampling_params_from(given, defaults={"max_tokens": 24})
    assert (params.temperature, params.max_tokens, params.logit_bias, params.stop_token_ids, params.seed) == (
        1.0,
        24,
        {3: 2.0},
        [7],
        None,
    )


def test_a_hook_of_another_thread_waits_for_the_loop(runner: asyncio.Runner) -> None:
    async def use() -> list[str]:
        done = []

        async def stop() -> None:
            await asyncio.sleep(0)
            done.append("stopped")

        hook = awaited_from_elsewhere(stop)
        hook()
        assert done == []
        await asyncio.to_thread(hook)
        return done

    assert runner.run(use()) == ["stopped"]


def test_a_hook_that_fails_does_not_keep_the_engine_alive(
    runner: asyncio.Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def use() -> None:
        async def stop() -> None:
            raise RuntimeError("stuck")

        await asyncio.to_thread(awaited_from_elsewhere(stop))

    runner.run(use())
    assert "sessions.not_closed" in caplog.text
    assert "stuck" in caplog.text


def test_vllm_loads_the_plugin_only_when_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the entry point promises; the entry point itself is in the metadata of an installed package."""

    class Entry:
        name, value = "kvpolicy", "kvpolicy.serving:endpoint_plugin"

        def load(self) -> Any:
            return endpoint_plugin

    groups: list[str] = []

    def entry_points(*, group: str) -> list[Entry]:
        groups.append(group)
        return [Entry()]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert load_endpoint_plugins(("generate",)) == []
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert load_endpoint_plugins(("generate",)) == []
    monkeypatch.setenv("VLLM_PLUGINS", "kvpolicy")
    assert load_endpoint_plugins(("embed",)) == []
    [plugin] = load_endpoint_plugins(("generate",))
    assert isinstance(plugin, EndpointPlugin)
    assert set(groups) == {ENDPOINT_PLUGINS_GROUP}


def test_the_plugin_serves_our_engine_and_refuses_a_stock_one(started: AsyncLLM, runner: asyncio.Runner) -> None:
    from fastapi import FastAPI

    async def use(
        engine: object,
        *,
        is_ours: bool = False,
        num_servers: int = 1,
        tokens_only: bool = False,
        has_tokenizer: bool = True,
    ) -> list[str]:
        args = SimpleNamespace(
            api_server_count=num_servers,
            headless=False,
            grpc=False,
            data_parallel_multi_port_external_lb=False,
            skip_tokenizer_init=not has_tokenizer,
            served_model_name=None,
            **CHAT_FLAGS | {"tokens_only": tokens_only},
        )
        app, plugin = FastAPI(), endpoint_plugin()
        plugin.attach_router(app)
        if is_ours:
            setattr(app.state, PLUGIN_MARK, True)
        await plugin.init_state(engine, app.state, args)
        return list(app.openapi()["paths"])

    paths = runner.run(use(started))
    assert paths
    assert all(path.startswith("/v1/streaming/") for path in paths)
    # ``kvpolicy serve`` has its own flag for that.
    assert runner.run(use(started, is_ours=True)) == []
    with pytest.raises(PolicyUsageError, match="kvpolicy serve MODEL --enable-streaming"):
        runner.run(use(object()))
    with pytest.raises(PolicyUsageError, match="--api-server-count 2: must be 1"):
        runner.run(use(started, num_servers=2))
    with pytest.raises(PolicyUsageError, match="--tokens-only: not supported"):
        runner.run(use(started, tokens_only=True))
    with pytest.raises(PolicyUsageError, match="--skip-tokenizer-init: not supported"):
        runner.run(use(started, has_tokenizer=False))

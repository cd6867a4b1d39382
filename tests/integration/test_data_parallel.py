"""Two data-parallel engines: a session stays on the engine that holds it, and nothing is counted twice (R.9)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM as StockAsyncLLM

from kvpolicy.adapters.vllm import AsyncLLM
from kvpolicy.core.errors import PolicyUsageError
from tests.integration.engine import SteppedEngine, SteppedSession
from tests.integration.live import PATIENCE_S, engine_options, exact, late_chunk, ordinary
from tests.integration.replay import random_chunks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

WINDOW = {"total_tokens": 256, "min_total_tokens": 64}


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, runner: asyncio.Runner, tiny_model: Path) -> Iterator[Any]:
    options = engine_options(tiny_model, data_parallel_size=2)

    async def start() -> Any:
        if request.param == "stock":
            return StockAsyncLLM.from_engine_args(AsyncEngineArgs(**options, disable_log_stats=True))
        return AsyncLLM(**options)

    engine = runner.run(start())
    yield engine
    engine.shutdown()


EVERY_ENGINE = pytest.mark.parametrize(
    "engine",
    [
        pytest.param(
            "stock",
            marks=pytest.mark.xfail(reason="chunks go to both engines in turn", raises=AssertionError, strict=True),
        ),
        "ours",
    ],
    indirect=True,
)
OURS = pytest.mark.parametrize("engine", ["ours"], indirect=True)


async def say(engine: Any, name: str, chunks: list[list[int]], **extra: Any) -> list[tuple[int, ...]]:
    """Feed a low-level stream chunk by chunk; return the replies."""
    may_send = asyncio.Semaphore(1)

    async def stream() -> AsyncGenerator[StreamingInput, None]:
        for chunk in chunks:
            await may_send.acquire()
            yield StreamingInput(prompt=TokensPrompt(prompt_token_ids=chunk))

    params = SamplingParams(
        temperature=0.0, max_tokens=5, ignore_eos=True, output_kind=RequestOutputKind.DELTA, extra_args=extra or None
    )
    replies: list[tuple[int, ...]] = [()]
    async for output in engine.generate(stream(), params, name):
        replies[-1] += tuple(output.outputs[0].token_ids)
        if output.outputs[0].finish_reason is not None:
            replies.append(())
            may_send.release()
    return replies[:-1]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[tuple[int, ...]]:
    """What one engine alone says to the chunks of seed 3."""
    engine = SteppedEngine(tiny_model)
    session = SteppedSession(engine, "alone", retention=None, max_tokens=5)
    said = [session.push(chunk).token_ids for chunk in random_chunks(3, 10, 18, 24)]
    engine.close()
    return said


@EVERY_ENGINE
def test_a_session_stays_on_its_engine(engine: Any, runner: asyncio.Runner, expected: list[tuple[int, ...]]) -> None:
    said = runner.run(asyncio.wait_for(say(engine, "alone", random_chunks(3, 10, 18, 24)), PATIENCE_S))
    assert said == expected


@EVERY_ENGINE
def test_the_load_counters_return_to_nothing(engine: Any, runner: asyncio.Runner) -> None:
    """One request in flight per session, whatever the number of its chunks, and none afterwards."""

    async def use() -> None:
        counted: list[int] = []

        async def watch() -> None:
            while True:
                counted.append(sum(engine.engine_core.engine_inflight.values()))
                await asyncio.sleep(0.001)

        watcher = asyncio.create_task(watch())
        await asyncio.wait_for(say(engine, "counted", random_chunks(3, 10, 18, 24)), PATIENCE_S)
        watcher.cancel()
        assert max(counted) <= 2  # one message more while it is being sent
        assert sum(engine.engine_core.engine_inflight.values()) == 0
        assert not engine.engine_core.reqs_in_flight

    runner.run(use())


@OURS
def test_a_chunk_that_comes_after_the_end_is_counted_back(engine: AsyncLLM, runner: asyncio.Runner) -> None:
    async def use() -> None:
        core = engine.engine_core
        session = engine.open_session(retention=WINDOW, sampling_params=exact(2))
        await session.push([5] * 10)
        ((request_id, identity),) = core.reqs_in_flight.items()
        await session.close()
        await nothing_in_flight(engine)
        late = await late_chunk(engine, request_id, data_parallel_rank=core.core_engines.index(identity))
        await core.add_request_async(late)
        assert core.engine_inflight[identity] == 1
        await nothing_in_flight(engine)

    runner.run(use())


async def nothing_in_flight(engine: AsyncLLM) -> None:
    """Wait until the load balancer counts nothing any more."""
    async with asyncio.timeout(PATIENCE_S):
        while engine.engine_core.reqs_in_flight:
            await asyncio.sleep(0.01)
    assert sum(engine.engine_core.engine_inflight.values()) == 0


@OURS
def test_sessions_spread_over_the_engines(engine: AsyncLLM, runner: asyncio.Runner) -> None:
    async def use() -> None:
        # What the engines had to do before counts, until the coordinator has said that it is done.
        async with asyncio.timeout(PATIENCE_S):
            while any(waiting + running for waiting, running, _ in engine.engine_core.lb_engines):
                await asyncio.sleep(0.01)
        sessions = [engine.open_session(retention=WINDOW, sampling_params=exact(5)) for _ in range(4)]
        chunks = random_chunks(4, 25, 18, 24)
        said = [await asyncio.gather(*(session.push(chunk) for session in sessions)) for chunk in chunks]
        for replies in said:
            assert len({reply.token_ids for reply in replies}) == 1
        held = engine.engine_core.reqs_in_flight
        ranks = [engine.engine_core.core_engines.index(identity) for identity in held.values()]
        assert sorted(ranks) == [0, 0, 1, 1]
        assert (
            sum(reply.num_evicted_tokens for reply in said[-1]) + sum(s.stats().num_evicted_tokens for s in sessions)
            > 0
        )
        await sessions[0].close()
        await engine.abort(sessions[1].id)
        with pytest.raises(Exception, match="session"):
            await sessions[1].push([5] * 20)
        for session in sessions:
            await session.close()
        # What was refused at once must not stay counted either.
        refused = engine.open_session(retention={"total_tokens": 2000}, sampling_params=exact(4))
        with pytest.raises(PolicyUsageError):
            await refused.push([5] * 10)
        await refused.close()
        for i in range(4):
            assert len(await ordinary(engine, [5 + i] * 20)) == 4
        await nothing_in_flight(engine)

    runner.run(use())

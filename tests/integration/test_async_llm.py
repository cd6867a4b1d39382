"""The facade: the real AsyncLLM, its engine in processes of its own, sessions as a user holds them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from kvpolicy.adapters.vllm import AsyncLLM
from kvpolicy.core.errors import (
    ChunkRefusedError,
    PolicyUsageError,
    SessionClosedError,
    SessionFailedError,
)
from tests.integration.live import (
    PATIENCE_S,
    engine_options,
    exact,
    num_missing_blocks,
    ordinary,
    standing_still,
)
from tests.integration.replay import random_chunks

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.outputs import RequestOutput

WINDOW = {"total_tokens": 256, "min_total_tokens": 64}
T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


@pytest.fixture(scope="module")
def engine(runner: asyncio.Runner, tiny_model: Path) -> Iterator[AsyncLLM]:
    async def start() -> AsyncLLM:
        return AsyncLLM(**engine_options(tiny_model))

    engine = runner.run(start())
    yield engine
    engine.shutdown()


@pytest.fixture
def run(runner: asyncio.Runner) -> Run[Any]:
    return runner.run


def frontend_sizes(engine: AsyncLLM) -> dict[str, int]:
    """Every container of the front end that holds something for the one session that is open."""
    processor = engine.output_processor
    (state,) = processor.request_states.values()
    return {
        "prompt": len(state.prompt or ""),
        "prompt ids": len(state.prompt_token_ids),
        "output ids": len(state.detokenizer.output_token_ids),
        "output text": len(state.detokenizer.output_text),
        "queue": len(state.input_chunk_queue or ()),
        "ids": len(processor.external_req_ids),
        "sent": len(engine._streams),
    }


def test_a_session_in_text(engine: AsyncLLM, run: Run[None]) -> None:
    async def use() -> None:
        async with engine.open_session(
            system_prompt="You watch a log.", retention=WINDOW, sampling_params=exact(6)
        ) as session:
            replies = [await session.push(f"line {i}: the pump is running") for i in range(40)]
            stats = session.stats()
        assert [reply.chunk for reply in replies] == list(range(40))
        assert all(len(reply.token_ids) == 6 for reply in replies)
        assert all(0 < reply.ttft_s <= reply.total_s for reply in replies)
        assert max(reply.resident_tokens for reply in replies) <= 256
        assert max(reply.num_blocks for reply in replies) <= 17
        assert sum(reply.evicted for reply in replies) == stats.num_evicted_tokens > 0
        assert stats.num_chunks == 40
        assert stats.num_reply_tokens == 240
        assert any(reply.text for reply in replies)
        # 199 blocks: everything went back but what the session still holds.
        assert stats.num_free_blocks == 199 - stats.num_blocks

    run(use())


def test_the_front_end_does_not_grow(engine: AsyncLLM, run: Run[None]) -> None:
    async def use() -> None:
        peak: dict[str, int] = {}
        async with engine.open_session(retention=WINDOW, sampling_params=exact(4)) as session:
            for i, chunk in enumerate(random_chunks(1, 300, 18, 24)):
                await session.push(chunk)
                sizes = frontend_sizes(engine)
                if i < 20:
                    peak = {name: max(size, peak.get(name, 0)) for name, size in sizes.items()}
                assert all(sizes[name] <= peak[name] + 12 for name in sizes), (sizes, peak)
        assert not engine.output_processor.request_states
        assert not engine.output_processor.external_req_ids

    run(use())


def test_the_low_level_form(engine: AsyncLLM, run: Run[None]) -> None:
    """``generate(stream)`` with the budgets in extra_args: the same session, the same tokens as through the facade."""

    async def use() -> None:
        chunks = random_chunks(2, 30, 18, 24)
        async with engine.open_session(retention=WINDOW, sampling_params=exact(5)) as session:
            expected = [(await session.push(chunk)).token_ids for chunk in chunks]
        answered = asyncio.Semaphore(1)

        async def stream() -> AsyncGenerator[StreamingInput, None]:
            for chunk in chunks:
                await answered.acquire()
                yield StreamingInput(prompt=TokensPrompt(prompt_token_ids=chunk))

        params = exact(5, extra_args={"streaming_retention": WINDOW}, output_kind=RequestOutputKind.DELTA)
        before = repr(params)
        said: list[list[int]] = [[]]
        async for output in engine.generate(stream(), params, "low-level"):
            said[-1] += output.outputs[0].token_ids
            if output.outputs[0].finish_reason is not None:
                assert output.kv_transfer_params["kvpolicy"]["resident_tokens"] <= 256
                said.append([])
                answered.release()
        assert [tuple(tokens) for tokens in said[:-1]] == expected
        assert repr(params) == before

    run(use())


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.2])
def test_reply_k_belongs_to_chunk_k_however_slow_the_consumer_is(
    engine: AsyncLLM, run: Run[None], delay_s: float
) -> None:
    """The stream never waits for a reply; what the consumer has not read yet stays apart (R.5)."""

    async def use() -> None:
        chunks = random_chunks(3, 25, 18, 24)
        async with engine.open_session(retention=WINDOW, sampling_params=exact(5)) as session:
            expected = [(await session.push(chunk)).token_ids for chunk in chunks]
        taken = 0

        async def stream() -> AsyncGenerator[StreamingInput, None]:
            nonlocal taken
            for chunk in chunks:
                taken += 1
                yield StreamingInput(prompt=TokensPrompt(prompt_token_ids=chunk))

        params = exact(5, extra_args={"streaming_retention": WINDOW}, output_kind=RequestOutputKind.DELTA)
        pauses = random.Random(5)
        said: list[list[int]] = [[]]
        async for output in engine.generate(stream(), params, "slow"):
            said[-1] += output.outputs[0].token_ids
            if output.outputs[0].finish_reason is not None:
                said.append([])
                await asyncio.sleep(delay_s * pauses.random())
        assert [tuple(tokens) for tokens in said[:-1]] == expected
        assert taken == len(chunks)

    run(use())


def test_two_sessions_and_ordinary_requests_at_once(engine: AsyncLLM, run: Run[None]) -> None:
    async def one(seed: int) -> list[tuple[int, ...]]:
        async with engine.open_session(retention=WINDOW, sampling_params=exact(5)) as session:
            return [(await session.push(chunk)).token_ids for chunk in random_chunks(seed, 25, 18, 24)]

    async def use() -> None:
        alone = await one(3)
        said = await asyncio.gather(one(3), one(4), *(ordinary(engine, [i] * 20) for i in range(5, 15)))
        assert said[0] == alone

    run(use())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"retention": {"total_tokens": 10}}, "total_tokens"),
        ({"retention": {"tokens": 10, "content_segments": 0}}, "tokens"),
        ({"sampling_params": SamplingParams(n=2)}, r"sampling_params\.n"),
        ({"sampling_params": SamplingParams(max_tokens=None)}, "max_tokens"),
        ({"sampling_params": SamplingParams(stop=["x"])}, "stop"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(
    engine: AsyncLLM, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PolicyUsageError, match=reason):
        engine.open_session(**arguments)
    assert not engine.output_processor.request_states


def test_a_session_that_the_engine_does_not_admit(engine: AsyncLLM, run: Run[None]) -> None:
    async def use() -> None:
        session = engine.open_session(retention={"total_tokens": 2000}, sampling_params=exact(4))
        with pytest.raises(PolicyUsageError, match="total_tokens") as caught:
            await session.push([5] * 10)
        assert len(caught.value.reasons) >= 2  # the context limit and the trained range
        with pytest.raises(PolicyUsageError):
            await session.push([5] * 10)
        await session.close()
        assert len(await ordinary(engine, [5, 6])) == 4
        assert not engine.output_processor.request_states

    run(use())


def test_a_refused_chunk_leaves_the_session_usable(engine: AsyncLLM, run: Run[None]) -> None:
    async def use() -> None:
        async with engine.open_session(retention=WINDOW, sampling_params=exact(4), use_chat_template=False) as session:
            await session.push([5] * 20)
            with pytest.raises(ChunkRefusedError) as caught:
                await session.push([6] * 300)
            assert caught.value.code == "chunk_too_long"
            assert "256" in str(caught.value)
            with pytest.raises(PolicyUsageError, match="at least one token"):
                await session.push([])
            with pytest.raises(PolicyUsageError, match="at least one token"):
                await session.push("")
            assert len((await session.push([6] * 20)).token_ids) == 4
            assert session.stats().num_refused == 1
            assert session.stats().num_chunks == 2

    run(use())


def test_a_token_that_the_model_does_not_have_costs_that_call_only(engine: AsyncLLM, run: Run[None]) -> None:
    """The first id behind the vocabulary, which vLLM lets pass: as a chunk, and as a prompt of one reply or two."""

    async def use() -> None:
        async with engine.open_session(retention=WINDOW, sampling_params=exact(4)) as session:
            for tokens in ([320], [5] * 20 + [320], [321]):
                with pytest.raises(PolicyUsageError, match=r"turn: expected token ids from 0 to 319 .*, got 32"):
                    await session.push(tokens)
            assert len((await session.push([5, 319])).token_ids) == 4
            assert session.stats().num_refused == 0
        for params in (exact(4), SamplingParams(n=2, max_tokens=4)):
            with pytest.raises(PolicyUsageError, match=r"prompt: expected token ids from 0 to 319 .*, got 320"):
                async for _ in engine.generate(TokensPrompt(prompt_token_ids=[5, 320]), params, "odd"):
                    pass
        assert len(await ordinary(engine, [5, 319])) == 4
        assert not engine.output_processor.request_states

    run(use())


@pytest.mark.parametrize(
    ("prompt", "more"),
    [([5, True], {}), ([5], {"seed": True}), ([5], {"logprob_token_ids": [5.5]}), ([5], {"logit_bias": {5: "much"}})],
)
def test_a_request_that_the_engine_cannot_read_is_not_sent(
    engine: AsyncLLM, run: Run[None], prompt: list[int], more: dict[str, Any]
) -> None:
    """Sent, it ends the thread of the engine that reads for everybody."""

    async def use() -> None:
        with pytest.raises(PolicyUsageError, match="got"):
            async for _ in engine.generate(TokensPrompt(prompt_token_ids=prompt), exact(4, **more), "unreadable"):
                pass
        assert len(await ordinary(engine, [5, 6])) == 4

    run(asyncio.wait_for(use(), PATIENCE_S))


def test_a_text_of_any_length_costs_that_chunk_only(engine: AsyncLLM, run: Run[None]) -> None:
    """What can never fit is not even made into tokens; what takes long to encode is encoded in a thread."""

    async def use() -> None:
        async with engine.open_session(retention=WINDOW, sampling_params=exact(4)) as session:
            await session.push("hello")
            for num_chars in (5_000, 10_000_000):
                with pytest.raises(ChunkRefusedError, match="chunk_too_long"):
                    await session.push("x" * num_chars)
            # While one is being encoded another may come in first, and is not answered before the first one is ready.
            with standing_still(engine):
                long = asyncio.create_task(session.push("x" * 5_000))
                short = asyncio.create_task(session.push("hello", sampling_params=exact(60)))
                with pytest.raises(PolicyUsageError, match="one chunk is in flight"):
                    await long
            assert len((await short).token_ids) == 60
            assert len((await session.push("still here")).token_ids) == 4
        with pytest.raises(ChunkRefusedError, match="characters"):
            async with engine.open_session(system_prompt="x" * 10_000_000, retention=WINDOW) as session:
                await session.push("hello")

    run(use())


def test_one_chunk_in_flight_and_nothing_after_close(engine: AsyncLLM, run: Run[None]) -> None:
    async def use() -> None:
        session = engine.open_session(retention=WINDOW, sampling_params=exact(30))
        first = asyncio.create_task(session.push([5] * 20))
        await asyncio.sleep(0)
        with pytest.raises(PolicyUsageError, match="one chunk is in flight"):
            await session.push([6] * 20)
        assert len((await first).token_ids) == 30
        await session.close()
        await session.close()
        with pytest.raises(SessionClosedError):
            await session.push([6] * 20)
        never = engine.open_session(retention=WINDOW)
        await never.close()
        assert not engine.output_processor.request_states

    run(use())


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.01, 0.05])
def test_closing_while_a_reply_is_pending(engine: AsyncLLM, run: Run[None], delay_s: float) -> None:
    async def closed_in_time() -> bool:
        session = engine.open_session(retention=WINDOW, sampling_params=exact(100))
        push = asyncio.create_task(session.push([5] * 20))
        await asyncio.sleep(delay_s)
        is_pending = session._pending is not None
        await session.close()
        if is_pending:
            with pytest.raises(SessionClosedError):
                await push
        else:
            assert len((await push).token_ids) == 100
        return is_pending

    async def use() -> None:
        # Where this process was kept from running the reply may be complete; then it is tried again.
        for _ in range(20):
            if await closed_in_time():
                break
        else:
            pytest.fail("every reply was complete before its session was closed")
        assert await num_missing_blocks(engine) == 0
        assert not engine.output_processor.request_states

    run(use())


def test_a_caller_that_stops_waiting_does_not_lose_the_session(engine: AsyncLLM, run: Run[None]) -> None:
    async def use() -> None:
        async with engine.open_session(retention=WINDOW, sampling_params=exact(60)) as session:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.push([5] * 20), timeout=0.01)
            while session.stats().num_chunks == 0:
                await asyncio.sleep(0.01)
            reply = await session.push([5] * 20)
            assert reply.chunk == 1
            assert len(reply.token_ids) == 60

    run(use())


def test_a_session_without_retention_ends_with_an_error(engine: AsyncLLM, run: Run[None]) -> None:
    async def use() -> None:
        session = engine.open_session(retention=None, sampling_params=exact(4))

        async def push_all() -> None:
            for chunk in random_chunks(1, 40, 18, 24):
                await session.push(chunk)

        with pytest.raises(SessionFailedError) as caught:
            await push_all()
        assert caught.value.code == "context_exhausted"
        assert session.stats().num_chunks > 15  # what it held when its last reply ended
        assert session.stats().resident_tokens > 400
        await session.close()
        assert len(await ordinary(engine, [5, 6])) == 4

    run(use())


def test_a_stream_that_ends_without_a_chunk_costs_nothing(engine: AsyncLLM, run: Run[None]) -> None:
    async def use() -> None:
        async def stream() -> AsyncGenerator[StreamingInput, None]:
            return
            yield

        params = exact(4, output_kind=RequestOutputKind.DELTA)
        assert [output async for output in engine.generate(stream(), params, "empty")] == []
        assert not engine.output_processor.request_states

    run(use())


def test_a_cancelled_push_does_not_repeat_the_system_prompt(engine: AsyncLLM, run: Run[None]) -> None:
    async def use() -> None:
        async with engine.open_session(
            system_prompt="You are a bot.", retention=WINDOW, sampling_params=exact(30)
        ) as session:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.push("hello"), timeout=0.005)
            while session.stats().num_chunks == 0:
                await asyncio.sleep(0.01)
            before = session.stats().resident_tokens
            await session.push("hello")
            # The system prompt alone has more tokens than a later turn of one word.
            assert session.stats().resident_tokens - before < before + 30

    run(use())


@pytest.mark.parametrize(
    ("chunk", "params", "error"),
    [
        ([6] * 600, {}, ChunkRefusedError),
        ([999_999], {}, PolicyUsageError),
        ([6] * 10, {"logprobs": 1000}, PolicyUsageError),
    ],
    ids=["longer than the context", "id outside the vocabulary", "parameter that the engine refuses"],
)
def test_what_the_engine_would_not_take_in_leaves_the_session_usable(
    engine: AsyncLLM, run: Run[None], chunk: list[int], params: dict[str, Any], error: type[Exception]
) -> None:
    async def use() -> None:
        async with engine.open_session(retention=WINDOW, sampling_params=exact(4)) as session:
            await session.push([5] * 20)
            with pytest.raises(error):
                await session.push(chunk, sampling_params=exact(4, **params))
            assert len((await session.push([6] * 20)).token_ids) == 4

    run(use())


def test_each_chunk_has_its_own_log_probabilities(engine: AsyncLLM, run: Run[None]) -> None:
    async def use() -> None:
        async with engine.open_session(retention=WINDOW, sampling_params=exact(4)) as session:
            for num_best in (None, 3, None, 1, 0):
                reply = await session.push([5] * 10, sampling_params=exact(4, logprobs=num_best))
                expected = [] if num_best is None else list(reply.token_ids)
                assert len(reply.logprobs) == len(expected)
                for token, best in zip(expected, reply.logprobs, strict=True):
                    assert token in best
                    assert len(best) == max(num_best or 0, 1)  # greedy: the token itself is the best

    run(use())


def test_a_reply_that_repeats_itself_ends_no_session(engine: AsyncLLM, run: Run[None]) -> None:
    async def use() -> None:
        repetition = RepetitionDetectionParams(max_pattern_size=1, min_count=4)
        params = exact(20, logit_bias={9: 100.0}, repetition_detection=repetition)
        async with engine.open_session(retention=WINDOW, sampling_params=exact(4)) as session:
            reply = await session.push([5] * 10, sampling_params=params)
            assert (reply.token_ids, reply.finish_reason) == ((9,) * 4, "repetition")
            assert reply.stop_reason == "repetition_detected"
            assert len((await session.push([5] * 10)).token_ids) == 4

    run(use())


def test_the_seed_of_each_chunk_takes_effect(engine: AsyncLLM, run: Run[None]) -> None:
    """The same chunk with the same seed gets the same reply, whatever seed (or none) the chunk before had."""

    def seeded(seed: int | None) -> SamplingParams:
        return SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True)

    async def one(first: SamplingParams) -> tuple[int, ...]:
        async with engine.open_session(retention=WINDOW, sampling_params=exact(1)) as session:
            await session.push([5] * 20, sampling_params=first)
            return (await session.push([6] * 20, sampling_params=seeded(7))).token_ids

    async def use() -> None:
        first = await one(exact(1))
        assert await one(exact(1)) == first
        seed = seeded(1)
        seed.max_tokens = 1  # nothing of a reply of one token is kept, so both sessions hold the same
        assert await one(seed) == first

    run(use())


@pytest.mark.parametrize("wait_s", [0.0, 0.002, 0.05])
def test_an_abort_from_outside_ends_the_session(engine: AsyncLLM, run: Run[None], wait_s: float) -> None:
    async def use() -> None:
        session = engine.open_session(retention=WINDOW, sampling_params=exact(4))
        await session.push([5] * 20)
        await engine.abort(session.id)
        await asyncio.sleep(wait_s)
        with pytest.raises((SessionFailedError, SessionClosedError)):
            await asyncio.wait_for(session.push([6] * 20), PATIENCE_S)
        await asyncio.wait_for(session.close(), PATIENCE_S)
        assert not engine.output_processor.request_states
        assert len(await ordinary(engine, [5, 6])) == 4

    run(use())


def test_an_input_stream_that_raises_ends_with_its_own_exception(engine: AsyncLLM, run: Run[None]) -> None:
    async def use(num_chunks: int) -> None:
        async def stream() -> AsyncGenerator[StreamingInput, None]:
            for _ in range(num_chunks):
                yield StreamingInput(prompt=TokensPrompt(prompt_token_ids=[5] * 20))
            raise KeyError("mine")

        params = exact(4, extra_args={"streaming_retention": WINDOW}, output_kind=RequestOutputKind.DELTA)
        with pytest.raises(KeyError, match="mine"):
            _ = [output async for output in engine.generate(stream(), params, f"raises-{num_chunks}")]
        async with asyncio.timeout(PATIENCE_S):
            while engine.output_processor.request_states:
                await asyncio.sleep(0.01)
        assert len(await ordinary(engine, [5, 6])) == 4

    for num_chunks in range(3):
        run(use(num_chunks))


def test_closing_does_not_cancel_the_message_that_ends_the_session(
    engine: AsyncLLM, run: Run[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock vLLM forgets the task that sends it as soon as the input has ended, so that nobody can."""
    send = engine.engine_core.add_request_async

    async def slowly(request: Any) -> None:
        await asyncio.sleep(0)
        await send(request)

    async def use() -> None:
        monkeypatch.setattr(engine.engine_core, "add_request_async", slowly)
        async with engine.open_session(retention=WINDOW, sampling_params=exact(2)) as session:
            await session.push([5] * 20)
        async with asyncio.timeout(PATIENCE_S):
            while engine._streams:
                await asyncio.sleep(0)
        assert await num_missing_blocks(engine) == 0

    run(use())


def test_a_configuration_without_our_classes_is_refused(tiny_model: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    with pytest.raises(PolicyUsageError, match="scheduler_cls"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_options(tiny_model)))


@pytest.mark.parametrize("priority", [1.5, True, "high"])
def test_a_priority_is_an_integer(engine: AsyncLLM, priority: Any) -> None:
    with pytest.raises(PolicyUsageError, match="priority"):
        engine.open_session(priority=priority)


async def shut_down_under_a_push(engine: AsyncLLM) -> None:
    """Whoever waits for a reply is told, or for a stream that the engine has not heard of; and closing works."""

    async def never() -> AsyncGenerator[StreamingInput, None]:
        await asyncio.sleep(10 * PATIENCE_S)
        yield StreamingInput(prompt="never")

    async def first_output() -> RequestOutput:
        return await anext(engine.generate(never(), exact(2), "nothing yet"))

    waiting = asyncio.create_task(first_output())
    while not engine._streams:
        await asyncio.sleep(0.01)
    session = engine.open_session(retention=WINDOW, sampling_params=exact(150))
    while True:
        push = asyncio.create_task(session.push([5] * 20))
        await asyncio.sleep(0.05)
        if session._pending is not None:
            break
        await push  # this process was kept from running for so long: once more
    engine.shutdown()
    with pytest.raises(SessionFailedError, match="engine"):
        await asyncio.wait_for(push, PATIENCE_S)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(waiting, PATIENCE_S)
    await asyncio.wait_for(session.close(), PATIENCE_S)


def test_the_default_compilation_mode(runner: asyncio.Runner, tiny_model: Path) -> None:
    """Not eager: the compiled graph reads the positions that the runner shifted. Same tokens as the eager engine."""

    async def said(*, eager: bool) -> list[tuple[int, ...]]:
        engine = AsyncLLM(**engine_options(tiny_model, enforce_eager=eager))
        async with engine.open_session(retention=WINDOW, sampling_params=exact(5)) as session:
            replies = [await session.push(chunk) for chunk in random_chunks(5, 20, 18, 24)]
        await shut_down_under_a_push(engine)
        assert sum(reply.evicted for reply in replies) > 0
        return [reply.token_ids for reply in replies]

    assert runner.run(said(eager=False)) == runner.run(said(eager=True))

"""What stock vLLM does to streams, beside what ours does: each fault fails on the stock classes and passes on ours.

After each test an ordinary request on the same engine still answers. The faults of the scheduler alone are in
``test_stock.py``, those of the queue in ``test_collector.py``, those of data parallelism in ``test_data_parallel.py``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM as StockAsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from kvpolicy.adapters.vllm import AsyncLLM
from kvpolicy.adapters.vllm.v0_28.collector import MAX_OPEN_CHUNKS
from kvpolicy.core.errors import PolicyUsageError, SessionFailedError
from tests.integration.live import PATIENCE_S, engine_options, exact, num_missing_blocks, ordinary
from tests.integration.replay import random_chunks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
    from pathlib import Path

# The stock classes hang in some of these. Ours answer in milliseconds, and have as long as a slow machine may need.
STOCK_PATIENCE_S = 3.0
WINDOW = {"total_tokens": 256, "min_total_tokens": 64}


class Figures(StatLoggerBase):  # type: ignore[misc]
    """Keeps what an engine counts, as a metrics page would."""

    def __init__(self) -> None:
        self.first_token_s: list[float] = []
        self.pool_usage = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if iteration_stats is not None:
            self.first_token_s += iteration_stats.time_to_first_tokens_iter
        if scheduler_stats is not None:
            self.pool_usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        pass

    def factory(self) -> Any:
        """Return what vLLM calls to make a logger."""
        return lambda _config, _index=0: self


@pytest.fixture(scope="module")
def engines(runner: asyncio.Runner, tiny_model: Path) -> Iterator[dict[str, Any]]:
    """Both engines, each in a process of its own."""

    async def start() -> dict[str, Any]:
        options = engine_options(tiny_model)
        figures = Figures(), Figures()
        ours = AsyncLLM(**options, stat_loggers=[figures[0].factory()])
        stock = StockAsyncLLM.from_engine_args(AsyncEngineArgs(**options), stat_loggers=[figures[1].factory()])
        return {"ours": ours, "stock": stock, "figures": dict(zip(("ours", "stock"), figures, strict=True))}

    engines = runner.run(start())
    yield engines
    engines["ours"].shutdown()
    engines["stock"].shutdown()


@pytest.fixture
def engine(request: pytest.FixtureRequest, engines: dict[str, Any], runner: asyncio.Runner) -> Iterator[Any]:
    """One of them; afterwards it still answers an ordinary request, and ours has nothing left."""
    engine = engines[request.param]
    yield engine
    assert len(runner.run(asyncio.wait_for(ordinary(engine, [5, 6]), PATIENCE_S))) == 4
    if request.param == "ours":
        assert not engine.output_processor.request_states
        assert not engine.output_processor.external_req_ids
        assert not engine._streams
        assert runner.run(num_missing_blocks(engine)) == 0


@pytest.fixture
def figures(request: pytest.FixtureRequest, engines: dict[str, Any]) -> Figures:
    """What that engine counts."""
    kept: Figures = engines["figures"][request.node.callspec.params["engine"]]
    return kept


def only_ours_passes(reason: str) -> pytest.MarkDecorator:
    stock = pytest.param("stock", marks=pytest.mark.xfail(reason=reason, strict=True))
    return pytest.mark.parametrize("engine", [stock, "ours"], indirect=True)


OURS = pytest.mark.parametrize("engine", ["ours"], indirect=True)
BOTH = pytest.mark.parametrize("engine", ["stock", "ours"], indirect=True)


def chunk(tokens: Sequence[int], params: SamplingParams | None = None) -> StreamingInput:
    return StreamingInput(prompt=TokensPrompt(prompt_token_ids=list(tokens)), sampling_params=params)


def delta(max_tokens: int = 4, **more: Any) -> SamplingParams:
    return exact(max_tokens, output_kind=RequestOutputKind.DELTA, **more)


async def stream_of(*chunks: StreamingInput | Exception) -> AsyncGenerator[StreamingInput, None]:
    """Yield chunks without waiting for replies; raise where an exception stands."""
    for item in chunks:
        if isinstance(item, Exception):
            raise item
        yield item


class Heard:
    """What a consumer was told: token ids, finish and stop reason of each reply, and the last output."""

    def __init__(self) -> None:
        self.replies: list[tuple[list[int], str, Any]] = []
        self.reports: list[Any] = []
        self.last: Any = None

    async def listen(
        self, outputs: Any, *, pause_s: float = 0.0, may_go_on: Callable[[], bool] = lambda: True
    ) -> Heard:
        """Read everything; after each reply take a pause, and a longer one until something holds."""
        tokens: list[int] = []
        async for output in outputs:
            self.last = output
            completion = output.outputs[0]
            tokens = [*tokens, *completion.token_ids]
            if completion.finish_reason is not None:
                self.replies.append((tokens, completion.finish_reason, completion.stop_reason))
                self.reports.append((output.kv_transfer_params or {}).get("kvpolicy"))
                tokens = []
                await asyncio.sleep(pause_s)
                while not may_go_on():
                    await asyncio.sleep(0.01)
        return self


def patience_s(engine: Any) -> float:
    """Return how long an engine has before it is said to hang."""
    return PATIENCE_S if isinstance(engine, AsyncLLM) else STOCK_PATIENCE_S


def hear(
    runner: asyncio.Runner,
    engine: Any,
    stream: Any,
    params: SamplingParams,
    name: str,
    *,
    limit_s: float | None = None,
    **more: Any,
) -> Heard:
    """Read a whole stream; one that hangs is a failure."""

    async def read() -> Heard:
        outputs = engine.generate(stream, params, name)
        try:
            return await asyncio.wait_for(Heard().listen(outputs, **more), limit_s or patience_s(engine))
        finally:
            await outputs.aclose()

    return runner.run(read())


@only_ours_passes("a slow consumer gets the replies of two chunks as one")
def test_no_boundary_is_lost(engine: Any, runner: asyncio.Runner) -> None:
    chunks = [chunk(tokens) for tokens in random_chunks(1, 6, 10, 20)]
    heard = hear(
        runner,
        engine,
        stream_of(*chunks),
        delta(),
        "slow",
        # It reads on when all replies are made, however fast the engine is.
        may_go_on=lambda: not engine.output_processor.request_states,
    )
    assert [(len(tokens), reason) for tokens, reason, _ in heard.replies] == [(4, "length")] * 6


@only_ours_passes("a placeholder is generated and sent to the consumer")
def test_a_stream_without_a_chunk_ends_without_engine_work(engine: Any, runner: asyncio.Runner) -> None:
    assert hear(runner, engine, stream_of(), delta(), "empty").last is None


@BOTH
@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_what_the_stream_raises_reaches_the_consumer_as_itself(
    engine: Any, runner: asyncio.Runner, num_chunks: int
) -> None:
    chunks = [chunk(tokens) for tokens in random_chunks(1, num_chunks, 10, 20)]
    with pytest.raises(KeyError, match="mine"):
        hear(runner, engine, stream_of(*chunks, KeyError("mine")), delta(), f"raises-{num_chunks}", limit_s=PATIENCE_S)


async def cancelled_producer(num_chunks: int) -> AsyncGenerator[StreamingInput, None]:
    """Yield chunks from a task that somebody cancels."""
    for tokens in random_chunks(1, num_chunks, 10, 20):
        yield chunk(tokens)
    task = asyncio.create_task(asyncio.sleep(10))
    asyncio.get_running_loop().call_later(0.01, task.cancel)
    await task


@only_ours_passes(
    "a cancelled producer is taken for a cancelled input task: nobody tells the consumer, who waits for ever"
)
@pytest.mark.parametrize("num_chunks", [0, 2])
def test_a_producer_that_is_cancelled_ends_the_session(engine: Any, runner: asyncio.Runner, num_chunks: int) -> None:
    with pytest.raises(SessionFailedError, match="input_cancelled"):
        hear(runner, engine, cancelled_producer(num_chunks), delta(), f"cancelled-{num_chunks}")


@only_ours_passes("a chunk that the front end cannot take ends the session")
@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (chunk([9] * 512), "chunk_too_long"),
        (chunk([9] * 600), "chunk_too_long"),
        (StreamingInput(prompt="long " * 600), "unusable_chunk"),
        (chunk([]), "empty_chunk"),
        (chunk([999_999]), "unusable_chunk"),
        (chunk([9] * 5, delta(logprobs=1000)), "unusable_chunk"),
        (chunk([9] * 5, delta(stop=["x"])), "unsupported_parameters"),
        (chunk([9] * 5, delta(stop_token_ids=[320])), "unsupported_parameters"),
        (chunk([9] * 5, SamplingParams(n=2, max_tokens=4)), "unsupported_parameters"),
        (chunk([9] * 5, delta(prompt_logprobs=1)), "unsupported_parameters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("place", [0, 2], ids=["first", "third"])
@pytest.mark.parametrize("retention", [None, WINDOW], ids=["unbounded", "bounded"])
def test_bad_input_costs_a_chunk_and_not_the_session(
    engine: Any, runner: asyncio.Runner, bad: StreamingInput, code: str, *, place: int, retention: Any
) -> None:
    """Wherever it comes, and although nobody waits for replies: it is answered in its place."""
    chunks = [chunk(tokens) for tokens in random_chunks(1, 4, 10, 20)]
    chunks.insert(place, bad)
    extra = None if retention is None else {"streaming_retention": retention}
    heard = hear(runner, engine, stream_of(*chunks), delta(extra_args=extra), f"bad-{code}-{place}")
    expected = [(4, "length", None)] * 4
    expected.insert(place, (0, "length", f"kvpolicy:{code}"))  # type: ignore[arg-type]
    assert [(len(tokens), reason, stop) for tokens, reason, stop in heard.replies] == expected
    assert [report["chunk"] for report in heard.reports] == list(range(5))
    assert [report["code"] for report in heard.reports] == [code if i == place else None for i in range(5)]
    assert heard.reports[place]["message"]
    if place:
        assert heard.reports[place]["resident_tokens"] == heard.reports[place - 1]["resident_tokens"]


# On the stock classes each of these ends the thread that reads for everybody, or the stream.
MISTYPED = [
    (chunk([np.int64(5)]), "unusable_chunk"),
    (chunk([5, True]), "unusable_chunk"),
    (chunk([5.5]), "unusable_chunk"),  # type: ignore[list-item]
    (StreamingInput(prompt=TokensPrompt(prompt_token_ids=np.array([5, 6]))), "unusable_chunk"),
    (StreamingInput(prompt=TokensPrompt(prompt_token_ids=iter([5, 6]))), "unusable_chunk"),
    (None, "unusable_chunk"),
    ({"prompt_token_ids": [5]}, "unusable_chunk"),
    (chunk([9] * 5, delta(extra_args=[1])), "unusable_chunk"),
    (chunk([9] * 5, delta(2.5)), "unsupported_parameters"),  # type: ignore[arg-type]
    (chunk([9] * 5, SamplingParams(temperature=np.float32(0.5), max_tokens=4)), "unusable_chunk"),
]


@OURS
@pytest.mark.parametrize(("bad", "code"), MISTYPED, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("place", [0, 2], ids=["first", "third"])
def test_values_of_other_types_cost_a_chunk(
    engine: Any, runner: asyncio.Runner, bad: Any, code: str, place: int
) -> None:
    chunks = [chunk(tokens) for tokens in random_chunks(1, 4, 10, 20)]
    chunks.insert(place, bad)
    heard = hear(runner, engine, stream_of(*chunks), delta(), "mistyped")
    expected = [(4, None)] * 4
    expected.insert(place, (0, f"kvpolicy:{code}"))  # type: ignore[arg-type]
    assert [(len(tokens), stop) for tokens, _, stop in heard.replies] == expected


@OURS
def test_a_stop_token_that_does_not_exist_cannot_stop_the_engine(engine: Any, runner: asyncio.Runner) -> None:
    """With a shortest reply, vLLM looks it up in the logits of the whole batch."""
    for token in (320, 1 << 40, -321):
        bad = chunk([9] * 5, delta(min_tokens=2, stop_token_ids=[token]))
        heard = hear(runner, engine, stream_of(bad, chunk([9] * 5)), delta(), f"stop {token}")
        assert [stop for _, _, stop in heard.replies] == ["kvpolicy:unsupported_parameters", None]


@OURS
def test_parameters_of_a_stream_are_checked_like_those_of_a_chunk(engine: Any, runner: asyncio.Runner) -> None:
    for params in (delta(2.5), delta(extra_args=[1]), SamplingParams(temperature=np.float32(0.5), max_tokens=4)):  # type: ignore[arg-type]
        with pytest.raises(PolicyUsageError):
            hear(runner, engine, stream_of(chunk([5])), params, "bad stream")

    async def use() -> None:
        async with engine.open_session(retention=WINDOW, sampling_params=exact(2)) as session:
            with pytest.raises(PolicyUsageError, match="max_tokens"):
                await session.push([5] * 5, sampling_params=exact(2.5))  # type: ignore[arg-type]
            assert len((await session.push([5] * 5)).token_ids) == 2

    runner.run(use())


@OURS
def test_what_the_caller_gives_is_never_changed(engine: Any, runner: asyncio.Runner) -> None:
    """Deep down: vLLM's own checks fill in what they find."""
    words = StructuredOutputsParams(choice=["yes", "no"])
    params = delta(structured_outputs=words)
    before = repr(params), repr(words)
    heard = hear(runner, engine, stream_of(chunk([9] * 5, params), chunk([9] * 5)), params, "unchanged")
    assert len(heard.replies) == 2
    assert (repr(params), repr(words)) == before


@OURS
def test_a_first_chunk_that_asks_for_nothing_has_the_streams_budget(engine: Any, runner: asyncio.Runner) -> None:
    asks_for_none = exact(4, extra_args={"streaming_retention": None})
    chunks = [chunk(tokens, asks_for_none) for tokens in random_chunks(1, 40, 18, 24)]
    heard = hear(runner, engine, stream_of(*chunks), delta(extra_args={"streaming_retention": WINDOW}), "none")
    assert heard.reports[-1]["total_evicted_tokens"] > 0


@OURS
@pytest.mark.parametrize("who", ["a timeout around the yield", "somebody else"])
def test_an_input_task_that_is_cancelled_ends_the_session(engine: Any, runner: asyncio.Runner, who: str) -> None:
    """Not the producer is cancelled but the task that takes its chunks: vLLM tells nobody."""

    async def stream() -> AsyncGenerator[StreamingInput, None]:
        if who == "somebody else":
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(0.1, task.cancel)
            yield chunk([9] * 5)
            await asyncio.sleep(600)
        async with asyncio.timeout(0.2):
            while True:
                yield chunk([9] * 5)

    with pytest.raises(SessionFailedError, match="input_cancelled"):
        hear(runner, engine, stream(), delta(), f"cancelled by {who}", pause_s=0.05)


@only_ours_passes("a producer that never waits fills the queues, and the loop stands still")
def test_a_producer_that_never_waits_is_held_back(engine: Any, runner: asyncio.Runner) -> None:
    num_taken, num_read, most_open = 0, 0, 0

    async def stream() -> AsyncGenerator[StreamingInput, None]:
        nonlocal num_taken, most_open
        for _ in range(60):
            num_taken += 1
            most_open = max(most_open, num_taken - num_read)
            yield chunk([9] * 5)

    async def use() -> None:
        nonlocal num_read
        async for output in engine.generate(stream(), delta(2), "eager"):
            num_read += output.outputs[0].finish_reason is not None

    runner.run(asyncio.wait_for(use(), PATIENCE_S))
    assert most_open <= MAX_OPEN_CHUNKS + 1
    assert num_taken == num_read == 60


@OURS
def test_an_idle_session_that_the_engine_ends_says_why(engine: Any, runner: asyncio.Runner) -> None:
    async def use() -> None:
        session = engine.open_session(retention=WINDOW, sampling_params=exact(2))
        await session.push([5] * 5)
        (request_id,) = engine.output_processor.request_states
        report = {"kvpolicy": {"code": "internal_error", "message": "boom"}}
        ended = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, kv_transfer_params=report)
        processed = engine.output_processor.process_outputs([ended])
        await engine.engine_core.abort_requests_async(processed.reqs_to_abort)
        await asyncio.sleep(0.05)
        for _ in range(2):
            with pytest.raises(SessionFailedError, match="internal_error: boom"):
                await session.push([5] * 5)
        await asyncio.wait_for(asyncio.gather(session.close(), session.close()), PATIENCE_S)

    runner.run(use())


@only_ours_passes("nothing but bad input: the placeholder again")
def test_a_stream_of_bad_chunks_only(engine: Any, runner: asyncio.Runner) -> None:
    heard = hear(runner, engine, stream_of(chunk([]), chunk([9] * 600)), delta(), "bad only")
    assert [stop for _, _, stop in heard.replies] == ["kvpolicy:empty_chunk", "kvpolicy:chunk_too_long"]


@only_ours_passes("a chunk's own max_tokens is never looked at")
def test_each_chunk_has_its_own_parameters(engine: Any, runner: asyncio.Runner) -> None:
    """Also where the outputs of a chunk are asked for in another form: that is the stream's alone."""
    lengths = (2, 9, 1, 5)
    chunks = [chunk([9] * 10, exact(n)) for n in lengths]
    heard = hear(runner, engine, stream_of(*chunks), delta(7), "own")
    assert [len(tokens) for tokens, _, _ in heard.replies] == list(lengths)


@OURS
def test_the_budget_of_the_stream_holds_where_chunks_have_their_own_parameters(
    engine: Any, runner: asyncio.Runner
) -> None:
    chunks = [chunk(tokens, exact(4)) for tokens in random_chunks(1, 40, 18, 24)]
    heard = hear(runner, engine, stream_of(*chunks), delta(extra_args={"streaming_retention": WINDOW}), "budget")
    assert heard.reports[-1]["total_evicted_tokens"] > 0
    assert max(report["resident_tokens"] for report in heard.reports) <= 256

    async def use() -> None:
        async with engine.open_session(retention=WINDOW, sampling_params=exact(4)) as session:
            for tokens in random_chunks(1, 40, 18, 24):
                await session.push(tokens, sampling_params=exact(4))
            assert session.stats().num_evicted_tokens > 0

    runner.run(use())


@OURS
def test_an_error_comes_after_the_reply_before_it(engine: Any, runner: asyncio.Runner) -> None:
    """The scheduler answers the chunk that no longer fits in the step in which the reply before it ends."""
    chunks = [chunk(tokens) for tokens in random_chunks(1, 40, 18, 24)]
    heard = hear(runner, engine, stream_of(*chunks), delta(), "full")
    assert all(tokens and reason == "length" for tokens, reason, _ in heard.replies[:-1])
    assert heard.replies[-1] == ([], "error", "kvpolicy:context_exhausted")
    assert heard.last.finished
    assert len(heard.replies) > 15


@only_ours_passes("ABORT and ERROR are taken for the end of a reply: the consumer waits for ever")
@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
@pytest.mark.parametrize("with_reply", [False, True])
def test_what_ends_a_session_ends_it_at_once(
    engine: Any, runner: asyncio.Runner, reason: FinishReason, *, with_reply: bool
) -> None:
    """The engine says so in the middle of everything, in one batch with a piece of the reply or alone."""
    name = f"ended-{reason.name}-{with_reply}"

    async def endless() -> AsyncGenerator[StreamingInput, None]:
        yield chunk([9] * 10)
        await asyncio.sleep(600)

    async def use() -> Heard:
        heard = Heard()
        outputs = engine.generate(endless(), delta(400), name)
        listening = asyncio.create_task(heard.listen(outputs))
        while heard.last is None:
            await asyncio.sleep(0.001)
        (request_id,) = (key for key in engine.output_processor.request_states if key.startswith(name))
        batch = [EngineCoreOutput(request_id, [], finish_reason=reason)]
        if with_reply:
            batch.insert(0, EngineCoreOutput(request_id, [7], finish_reason=FinishReason.LENGTH))
        processed = engine.output_processor.process_outputs(batch)
        await engine.engine_core.abort_requests_async(processed.reqs_to_abort)
        try:
            return await asyncio.wait_for(listening, patience_s(engine))
        finally:
            await outputs.aclose()

    heard = runner.run(use())
    assert heard.last.finished
    assert [told for _, told, _ in heard.replies] == ["length"] * with_reply + [reason.name.lower()]


@only_ours_passes("the first chunk's statistics are those of the whole session")
def test_the_statistics_are_those_of_the_chunk(engine: Any, runner: asyncio.Runner, figures: Figures) -> None:
    """One time to the first token per chunk; what was cached before it is what the session held."""
    before = len(figures.first_token_s)
    cached: list[int] = []

    async def use() -> None:
        may_send = asyncio.Semaphore(1)

        async def stream() -> AsyncGenerator[StreamingInput, None]:
            for _ in range(5):
                await may_send.acquire()
                yield chunk([9] * 10)

        async for output in engine.generate(stream(), delta(3), "figures"):
            if output.outputs[0].finish_reason is not None:
                cached.append(output.num_cached_tokens)
                may_send.release()

    runner.run(asyncio.wait_for(use(), PATIENCE_S))
    assert cached == [0, 12, 24, 36, 48]  # 10 tokens and 2 of 3 reply tokens each
    assert len(figures.first_token_s) - before == 5


@only_ours_passes("a chunk that was on its way when its session ended opens a session that nobody can abort")
def test_an_aborted_session_does_not_come_back(engine: Any, runner: asyncio.Runner, figures: Figures) -> None:
    """The message of a chunk arrives after the abort: the engine answers it, and holds nothing for it."""

    async def waiting() -> AsyncGenerator[StreamingInput, None]:
        yield chunk([9] * 10)
        await asyncio.sleep(600)

    async def use() -> None:
        listening = asyncio.create_task(Heard().listen(engine.generate(waiting(), delta(2), "late")))
        while not engine.output_processor.request_states:
            await asyncio.sleep(0.001)
        (request_id,) = engine.output_processor.request_states
        late = engine.input_processor.process_inputs(
            request_id=request_id,
            prompt=TokensPrompt(prompt_token_ids=[9] * 10),
            params=delta(2, extra_args={"kvpolicy": {"ordinal": 1, "first": False, "final": False}}),
            supported_tasks=await engine.get_supported_tasks(),
            resumable=True,
        )
        await engine.abort("late")
        await asyncio.wait_for(asyncio.gather(listening, return_exceptions=True), patience_s(engine))
        await engine.engine_core.add_request_async(late)
        await asyncio.sleep(0.1)
        await ordinary(engine, [5, 6])
        await asyncio.sleep(0.1)
        await ordinary(engine, [5, 6])
        usage = figures.pool_usage
        await engine.engine_core.abort_requests_async([request_id])  # what nobody who does not know the id can do
        assert usage == 0.0

    runner.run(use())

"""What stock vLLM does to streams, beside what ours does: each fault fails on the stock classes and passes on ours.

After each test an ordinary request on the same engine still answers. The faults of the scheduler alone are in
``test_stock.py``, those of the queue in ``test_collector.py``, those of data parallelism in ``test_data_parallel.py``.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sized
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM as StockAsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from kvpolicy.adapters.vllm import AsyncLLM
from kvpolicy.adapters.vllm.v0_28.collector import MAX_OPEN_CHUNKS
from kvpolicy.core.errors import PolicyUsageError, SessionFailedError
from tests.integration.live import PATIENCE_S, engine_options, exact, late_chunk, num_missing_blocks, ordinary
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


# On the stock classes each of these ends the worker, the thread that reads for everybody, or the stream.
MISTYPED = [
    (chunk([np.int64(5)]), "unusable_chunk"),
    (chunk([5, True]), "unusable_chunk"),
    (chunk([5.5]), "unusable_chunk"),  # type: ignore[list-item]
    (chunk([5, 320]), "unusable_chunk"),
    (chunk([9] * 5, delta(allowed_token_ids=[5, True])), "unsupported_parameters"),
    (chunk([9] * 5, delta(logit_bias={5: "much"})), "unusable_chunk"),
    (chunk([9] * 5, delta(seed=1 << 64)), "unusable_chunk"),
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


@only_ours_passes("the session grows in the list of tokens that its first chunk came in")
def test_a_callers_tokens_are_never_changed(engine: Any, runner: asyncio.Runner) -> None:
    chunks = random_chunks(1, 3, 10, 20)
    prompts = [TokensPrompt(prompt_token_ids=list(tokens)) for tokens in chunks]
    hear(runner, engine, stream_of(*(StreamingInput(prompt=prompt) for prompt in prompts)), delta(), "tokens")
    assert prompts == [TokensPrompt(prompt_token_ids=tokens) for tokens in chunks]


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
    """Its prompt, one time to its first token, and what was cached before it: what the session held."""
    before = len(figures.first_token_s)
    cached: list[int] = []
    chunks = random_chunks(1, 5, 10, 10)

    async def use() -> None:
        may_send = asyncio.Semaphore(1)

        async def stream() -> AsyncGenerator[StreamingInput, None]:
            for tokens in chunks:
                await may_send.acquire()
                yield chunk(tokens)

        async for output in engine.generate(stream(), delta(3), "figures"):
            assert output.prompt_token_ids == chunks[len(cached)]
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
        late = await late_chunk(engine, request_id)
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


class Told:
    """What the engine core is told, and when the input has ended, in order."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.ids: set[str] = set()
        self.of_the_end = asyncio.Event()
        self._send, self.abort = engine.engine_core.add_request_async, engine.engine_core.abort_requests_async
        monkeypatch.setattr(engine.engine_core, "add_request_async", self._record_chunk)
        monkeypatch.setattr(engine.engine_core, "abort_requests_async", self._record_abort)

    async def _record_chunk(self, request: Any) -> None:
        self.order.append("chunk")
        self.ids.add(request.request_id)
        await self._send(request)

    async def _record_abort(self, request_ids: list[str]) -> None:
        self.order.append("abort")
        self.of_the_end.set()
        await self.abort(request_ids)

    async def stream(self, *, goes_on: bool) -> AsyncGenerator[StreamingInput, None]:
        """Yield a chunk, and another one as soon as the engine is told of the end, or cancelled if it ``goes_on``."""
        try:
            yield chunk([9] * 5)
            try:
                await self.of_the_end.wait()
            except asyncio.CancelledError:
                if not goes_on:
                    raise
            yield chunk([9] * 5)
        finally:
            self.order.append("input ended")


async def end_after_a_reply(engine: Any, stream: Any, how: str) -> None:
    """Read one reply, then end the stream."""
    outputs = engine.generate(stream, delta(2), "ended")
    async for output in outputs:
        if output.outputs[0].finish_reason is not None:
            break
    if how == "abort":
        await engine.abort("ended")
        assert [output.outputs[0].finish_reason async for output in outputs] == ["abort"]
    elif how == "close":
        await outputs.aclose()
    elif how == "cancel":
        reading = asyncio.create_task(Heard().listen(outputs))
        await asyncio.sleep(0)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading


@only_ours_passes("the engine is told first; the input ends whenever it likes, and is sent until then")
@pytest.mark.parametrize("how", ["abort", "close", "cancel", "forget"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["", "goes on"])
def test_the_input_ends_before_the_abort(
    engine: Any, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, how: str, *, goes_on: bool
) -> None:
    """The producer cleans up before the engine is told; what it yields after its cancellation is not sent."""
    told = Told(engine, monkeypatch)

    async def use() -> None:
        try:
            async with asyncio.timeout(patience_s(engine)):
                await end_after_a_reply(engine, told.stream(goes_on=goes_on), how)
                while not {"abort", "input ended"} <= set(told.order):
                    gc.collect()
                    await asyncio.sleep(0.001)
        finally:
            await told.abort(list(told.ids))

    runner.run(use())
    if goes_on:
        told.order.remove("input ended")  # its chunk was taken and the task has ended: what is left is to be collected
        assert told.order == ["chunk", "abort"]
    else:
        assert told.order == ["chunk", "input ended", "abort"]


@only_ours_passes("the engine has not heard of it, so there is nothing to abort: the consumer waits for ever")
def test_an_abort_before_the_first_chunk(engine: Any, runner: asyncio.Runner) -> None:
    """It ends a producer that never yields and tells the consumer, who waits."""
    told: list[str] = []
    is_waiting = asyncio.Event()

    async def stream() -> AsyncGenerator[StreamingInput, None]:
        try:
            is_waiting.set()
            await asyncio.sleep(600)
            yield chunk([9] * 5)
        finally:
            told.append("input ended")

    async def use() -> Heard:
        outputs = engine.generate(stream(), delta(), "early")
        listening = asyncio.create_task(Heard().listen(outputs))
        await is_waiting.wait()
        await engine.abort("early")
        told.append("abort returned")
        return await asyncio.wait_for(listening, patience_s(engine))

    heard = runner.run(use())
    assert heard.replies == [([], "abort", None)]
    assert heard.last.finished
    assert told == ["input ended", "abort returned"]


@OURS
@pytest.mark.parametrize("num_chunks", [0, 1])
def test_a_producer_may_abort_its_own_stream(engine: Any, runner: asyncio.Runner, num_chunks: int) -> None:
    """It cannot be waited for, and its own call must not cancel it before the consumer is told."""

    async def stream() -> AsyncGenerator[StreamingInput, None]:
        for _ in range(num_chunks):
            yield chunk([9] * 5)
        await engine.abort("own")

    heard = hear(runner, engine, stream(), delta(400), "own")
    assert heard.replies[-1][1:] == ("abort", None)
    assert len(heard.replies) == 1


@OURS
def test_an_abort_does_not_wait_for_ever(engine: Any, runner: asyncio.Runner) -> None:
    """A producer that will not be cancelled: the consumer is told, and the rest lets go once the producer ends."""
    may_end, has_ended = asyncio.Event(), asyncio.Event()

    async def stubborn() -> AsyncGenerator[StreamingInput, None]:
        try:
            yield chunk([9] * 5)
            while not may_end.is_set():
                with suppress(asyncio.CancelledError):
                    await may_end.wait()
            yield chunk([9] * 5)
        finally:
            has_ended.set()

    async def use() -> None:
        heard = Heard()
        listening = asyncio.create_task(heard.listen(engine.generate(stubborn(), delta(2), "stubborn")))
        async with asyncio.timeout(PATIENCE_S):
            while not heard.replies:
                await asyncio.sleep(0.001)
            await engine.abort("stubborn")
            await listening
            assert not may_end.is_set()
            assert heard.replies[1:] == [([], "abort", None)]
            assert len(engine._streams) == 1
            assert len(await ordinary(engine, [5, 6])) == 4
            may_end.set()
            while engine._streams:
                await asyncio.sleep(0.001)
            await has_ended.wait()

    try:
        runner.run(use())
    finally:
        may_end.set()


def sizes_of(state: Any) -> dict[str, int]:
    """Return the length of everything that the front end holds for a session and that has one."""
    parts = {"state": state, "detokenizer": state.detokenizer, "logprobs": state.logprobs_processor}
    return {
        f"{part}.{name}": len(value)
        for part, holder in parts.items()
        for name, value in vars(holder).items()
        if isinstance(value, Sized)
    }


@only_ours_passes("text, token ids and log-probabilities of the whole session are kept")
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_the_front_end_holds_one_chunk(engine: Any, runner: asyncio.Runner, kind: RequestOutputKind) -> None:
    sizes: list[dict[str, int]] = []
    may_send = asyncio.Semaphore(1)
    name = f"size-{kind.name}"

    async def stream() -> AsyncGenerator[StreamingInput, None]:
        for i in range(30):
            await may_send.acquire()
            yield StreamingInput(prompt=f"line {i % 10}")
        await may_send.acquire()  # so that its state is still there

    async def use() -> None:
        params = exact(4, output_kind=kind, logprobs=2, extra_args={"streaming_retention": WINDOW})
        async for output in engine.generate(stream(), params, name):
            if output.outputs[0].finish_reason is not None:
                (state,) = (s for key, s in engine.output_processor.request_states.items() if key.startswith(name))
                sizes.append(sizes_of(state))
                may_send.release()

    runner.run(asyncio.wait_for(use(), PATIENCE_S))
    assert len(sizes) == 30
    first = sizes[0]
    assert first["state.prompt"] == len("line 0")
    assert first["state.prompt_token_ids"] > 0
    assert first["logprobs.logprobs"] == 4
    for later in sizes:
        # A reply of four tokens has another text each time.
        assert all(later[name] <= first[name] + 20 for name in later), (later, first)


@only_ours_passes("each output tells what the whole session has said")
def test_a_cumulative_stream_tells_what_the_chunk_has_so_far(engine: Any, runner: asyncio.Runner) -> None:
    async def said(kind: RequestOutputKind) -> list[list[tuple[list[int], str, int]]]:
        """Return the tokens, the text and the number of log-probabilities of each output, by chunk."""
        may_send = asyncio.Semaphore(1)

        async def stream() -> AsyncGenerator[StreamingInput, None]:
            for tokens in random_chunks(1, 5, 10, 20):
                await may_send.acquire()
                yield chunk(tokens)

        outputs: list[list[tuple[list[int], str, int]]] = [[]]
        async for output in engine.generate(stream(), exact(6, output_kind=kind, logprobs=1), kind.name):
            completion = output.outputs[0]
            outputs[-1].append((list(completion.token_ids), completion.text, len(completion.logprobs)))
            if completion.finish_reason is not None:
                outputs.append([])
                may_send.release()
        return outputs[:-1]

    kinds = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)
    pieces, so_far = (runner.run(asyncio.wait_for(said(kind), PATIENCE_S)) for kind in kinds)
    assert len(pieces) == len(so_far) == 5
    for parts, growing in zip(pieces, so_far, strict=True):
        tokens = [token for part, _, _ in parts for token in part]
        text = "".join(part for _, part, _ in parts)
        assert growing[-1] == (tokens, text, 6)
        assert all(one == (tokens[: len(one[0])], text[: len(one[1])], len(one[0])) for one in growing)


@BOTH
def test_a_stream_of_final_outputs_only_is_refused(engine: Any, runner: asyncio.Runner) -> None:
    """By vLLM itself, before anything is sent: in a session no output is the last one."""
    params = exact(4, output_kind=RequestOutputKind.FINAL_ONLY)
    with pytest.raises(VLLMValidationError, match="FINAL_ONLY"):
        hear(runner, engine, stream_of(chunk([9] * 5)), params, "final only")

"""Sessions on a live engine, as a program holds them: a producer, a consumer, and a look into the engine's process."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
    from pathlib import Path

# Nothing takes this long; it ends what hangs, also on a machine that is slow or stands still for a while.
PATIENCE_S = 60.0


def engine_options(model: Path, **more: Any) -> dict[str, Any]:
    """Arguments of a small engine."""
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "block_size": 16,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 200,
        "kv_cache_memory_bytes": 1 << 28,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        **more,
    }


def exact(max_tokens: int, **more: Any) -> SamplingParams:
    """Greedy sampling parameters with replies of an exact length."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


async def ordinary(engine: Any, tokens: list[int], max_tokens: int = 4) -> list[int]:
    """Answer an ordinary request: after each fault the engine must still do it."""
    params = exact(max_tokens, output_kind=RequestOutputKind.FINAL_ONLY)
    async for output in engine.generate(TokensPrompt(prompt_token_ids=tokens), params, f"ordinary-{id(tokens)}"):
        last = output
    return list(last.outputs[0].token_ids)


async def num_missing_blocks(engine: Any) -> int:
    """Return how many blocks are neither free nor a probe session's own (one more is vLLM's null block)."""
    retention = {"total_tokens": 256, "min_total_tokens": 64}
    async with engine.open_session(retention=retention, sampling_params=exact(2)) as probe:
        await probe.push([5] * 20)
        stats = probe.stats()
        num_pool_blocks = int(engine.vllm_config.cache_config.num_gpu_blocks) - 1
        return num_pool_blocks - int(stats.num_free_blocks) - int(stats.num_blocks)


async def late_chunk(engine: Any, request_id: str, **more: Any) -> Any:
    """Return a later chunk of a session, as it is sent to the engine core."""
    return engine.input_processor.process_inputs(
        request_id=request_id,
        prompt=TokensPrompt(prompt_token_ids=[9] * 10),
        params=exact(2, extra_args={"kvpolicy": {"ordinal": 1, "first": False, "final": False}}),
        supported_tasks=await engine.get_supported_tasks(),
        resumable=True,
        **more,
    )


@contextmanager
def standing_still(engine: Any) -> Iterator[None]:
    """Stop the engine's own processes meanwhile: what they are sent stays unanswered, however slow a test is."""
    processes = [psutil.Process(process.pid) for process in engine.engine_core.resources.engine_manager.processes]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def core_state(worker: Any) -> dict[str, Any]:
    """Return what the scheduler and the worker hold. Runs inside the engine's process, between two steps.

    Sent with ``collective_rpc``, vLLM's own way of running something beside a worker. With one worker, the engine core
    itself calls it, in its own process: the core is found among the callers.
    """
    callers = (caller.frame.f_locals.get("self") for caller in inspect.stack(0))
    scheduler: Any = next(caller.scheduler for caller in callers if caller is not None and hasattr(caller, "scheduler"))
    pool = scheduler.kv_cache_manager.block_pool
    tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    return {
        "free": pool.get_num_free_blocks(),
        "requests": sorted(scheduler.requests),
        "states": {request_id: record.state.name for request_id, record in scheduler.sessions.records.items()},
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "skipped": [request.request_id for request in scheduler.skipped_waiting],
        "num_idle": scheduler.num_waiting_for_streaming_input,
        "unsent": len(scheduler._answers) + len(scheduler._reports) + len(scheduler._settling),
        "preempted": [
            request_id for request_id, record in scheduler.sessions.records.items() if record.request.num_preemptions
        ],
        "num_blocks": {request_id: len(table) for request_id, table in tables.items()},
        "runner": sorted(worker.model_runner.requests),
    }


class LiveStream:
    """A low-level stream whose chunks are given to it one by one, and whose replies a task of its own reads."""

    def __init__(
        self, engine: Any, request_id: str, *, retention: Mapping[str, Any] | None, max_tokens: int = 2
    ) -> None:
        self.engine, self.id, self.max_tokens = engine, request_id, max_tokens
        extra = {} if retention is None else {"extra_args": {"streaming_retention": dict(retention)}}
        self._params = self._sampling(max_tokens, **extra)
        self._chunks: asyncio.Queue[StreamingInput | Exception | None] = asyncio.Queue()
        self.waiting: asyncio.Future[Any] | None = None
        self.replies: list[tuple[list[int], str]] = []
        self.num_pieces = 0
        self._news = asyncio.Event()
        self.walks_away = False
        self.outputs: Any = engine.generate(self._produce(), self._params, request_id)
        self.consumer = asyncio.create_task(self._consume())

    @staticmethod
    def _sampling(max_tokens: int, **more: Any) -> SamplingParams:
        return SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA, **more
        )

    async def _produce(self) -> AsyncGenerator[StreamingInput, None]:
        while True:
            self.waiting = asyncio.ensure_future(self._chunks.get())
            chunk = await self.waiting
            if chunk is None:
                return
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def _consume(self) -> None:
        tokens: list[int] = []
        async for output in self.outputs:
            completion = output.outputs[0]
            tokens += completion.token_ids
            self.num_pieces += 1
            if completion.finish_reason is not None:
                assert not str(completion.stop_reason).startswith("kvpolicy:"), completion
                self.replies.append((tokens, completion.finish_reason))
                tokens = []
            self._news.set()
            if self.walks_away:
                return

    def send(self, tokens: Sequence[int], max_tokens: int | None = None) -> None:
        """Let the producer yield a chunk."""
        params = None if max_tokens is None else self._sampling(max_tokens)
        self._chunks.put_nowait(
            StreamingInput(prompt=TokensPrompt(prompt_token_ids=list(tokens)), sampling_params=params)
        )

    async def push(self, tokens: Sequence[int], max_tokens: int | None = None) -> list[int]:
        """Send a chunk and return its reply."""
        wanted = len(self.replies) + 1
        self.send(tokens, max_tokens)
        await self.until(lambda: len(self.replies) >= wanted)
        return self.replies[wanted - 1][0]

    async def next_piece(self) -> None:
        """Wait for another piece of a reply."""
        wanted = self.num_pieces + 1
        await self.until(lambda: self.num_pieces >= wanted)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                if self.consumer.done():
                    await self.consumer
                    message = f"{self.id}: the stream has ended"
                    raise AssertionError(message)
                self._news.clear()
                await self._news.wait()

    def end(self) -> None:
        """Let the producer return."""
        self._chunks.put_nowait(None)

    def fail(self, error: Exception) -> None:
        """Let the producer raise."""
        self._chunks.put_nowait(error)

    async def close(self) -> None:
        """End the stream and wait for its consumer."""
        self.end()
        await asyncio.wait_for(self.consumer, PATIENCE_S)


class LiveSession:
    """A session of the facade with the same handles."""

    def __init__(self, engine: Any, *, retention: Mapping[str, Any], max_tokens: int = 2) -> None:
        self.session = engine.open_session(retention=retention, sampling_params=self._sampling(max_tokens))
        self.id = self.session.id
        self.pending: asyncio.Task[Any] | None = None

    @staticmethod
    def _sampling(max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)

    def send(self, tokens: Sequence[int], max_tokens: int | None = None) -> None:
        """Push a chunk and do not wait for its reply."""
        params = None if max_tokens is None else self._sampling(max_tokens)
        self.pending = asyncio.create_task(self.session.push(list(tokens), sampling_params=params))

    async def push(self, tokens: Sequence[int], max_tokens: int | None = None) -> list[int]:
        """Push a chunk and return its reply."""
        self.send(tokens, max_tokens)
        assert self.pending is not None
        return list((await asyncio.wait_for(self.pending, PATIENCE_S)).token_ids)

    async def next_piece(self) -> None:
        """Wait until the reply has begun."""
        async with asyncio.timeout(PATIENCE_S):
            while self.session._pending is None or self.session._pending.first_s is None:
                await asyncio.sleep(0.001)

"""The real engine core in this process, stepped by hand: scheduler, KV-cache manager, worker and model are vLLM's own.

Stepping by hand makes every moment reachable (a preemption between two tokens of a reply, an abort before a
prefill) and lets a test look into the scheduler. The same engine in processes of its own is tested through
``AsyncLLM``.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from kvpolicy.adapters.vllm.shared.messages import (
    INTERNAL_KEY,
    RETENTION_KEY,
    ChunkReport,
    CompactionTotals,
    RequestKey,
)
from kvpolicy.adapters.vllm.shared.options import POLICY_KEY
from kvpolicy.adapters.vllm.v0_28.startup.engine_args import checked_config
from kvpolicy.core.states import SessionState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

NUM_LOGPROBS = 20
# Of a stock scheduler.
NO_SESSIONS = SimpleNamespace(records={})


@define
class RecordedEvents:
    """Event sink that keeps everything, in order."""

    events: list[Any] = field(factory=list)

    def emit(self, event: Any) -> None:
        self.events.append(event)

    def take(self, request_id: str) -> list[Any]:
        """Return one request's events and forget them."""
        taken = [event for event in self.events if event.request_id == request_id]
        self.events = [event for event in self.events if event.request_id != request_id]
        return taken


@frozen(kw_only=True)
class Answer:
    """What the engine said to one chunk: its tokens, the top log-probabilities of each step, and the report."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    finish_reason: str
    stop_reason: int | str | None
    report: ChunkReport | None
    prefill: Any = None
    result: Mapping[str, Any] | None = None
    totals: CompactionTotals | None = None


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    """Greedy sampling parameters with top log-probabilities and replies of an exact length."""
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": NUM_LOGPROBS} | more
    )


class SteppedEngine:
    """One engine core with our scheduler and worker (or, with ``stock``, vLLM's)."""

    def __init__(
        self,
        model: Path,
        *,
        stock: bool = False,
        max_sessions: int | None = None,
        kv_cache_policy: Any = None,
        **arguments: Any,
    ) -> None:
        options: dict[str, Any] = {
            "model": str(model),
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 512,
            "block_size": 16,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "num_gpu_blocks_override": 200,
            "kv_cache_memory_bytes": 1 << 28,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        } | arguments
        if stock:
            from vllm.engine.arg_utils import AsyncEngineArgs

            config = AsyncEngineArgs(**options).create_engine_config()
        else:
            config = checked_config(options, max_sessions=max_sessions, kv_cache_policy=kv_cache_policy)
        self.config = config
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self.events = RecordedEvents()
        if not stock:
            self.scheduler.sessions = evolve(self.scheduler.sessions, events=self.events)
        self.outputs: defaultdict[str, list[EngineCoreOutput]] = defaultdict(list)
        self.num_steps = 0

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def send(
        self,
        request_id: str,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        resumable: bool,
        priority: int = 0,
    ) -> None:
        """Send one message as the front end would: an ordinary request, a chunk, or an end of input."""
        message = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            mm_features=None,
            sampling_params=(params or greedy(4)).clone(),
            pooling_params=None,
            arrival_time=float(self.num_steps),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=resumable,
            priority=priority,
        )
        self.core.add_request(*self.core.preprocess_add_request(message))

    def start(
        self, key: str, tokens: Sequence[int], max_tokens: int, *, policy: Any = None, request_id: str | None = None
    ) -> str:
        """Send an ordinary request that draws by ``key``, as a facade would; return its id."""
        extra: dict[str, Any] = {} if policy is None else {POLICY_KEY: policy}
        params = greedy(max_tokens, extra_args=RequestKey(key).to_extra_args(extra))
        self.send(request_id or key, tokens, params, resumable=False)
        return request_id or key

    def step(self) -> None:
        """Run one engine step and keep its outputs by request."""
        batches, _ = self.core.step_fn()
        self.num_steps += 1
        for batch in (batches or {}).values():
            for output in batch.outputs:
                self.outputs[output.request_id].append(output)
        for record in getattr(self.scheduler, "sessions", NO_SESSIONS).records.values():
            self._check(record)

    def _check(self, record: Any) -> None:
        """What holds of a live session after every step: one queue at most, and accounts that agree while it rests."""
        request, scheduler = record.request, self.scheduler
        queues = [name for name in ("waiting", "skipped_waiting", "running") if request in getattr(scheduler, name)]
        assert len(queues) <= 1, (request.request_id, queues)
        if not record.is_idle:
            return
        block_size, num_held = scheduler.block_size, request.num_computed_tokens
        num_blocks = len(scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])
        is_parked = record.state is SessionState.PARKED
        assert queues == ([] if is_parked else ["skipped_waiting"])
        assert request.num_tokens == len(request.all_token_ids) == request.num_prompt_tokens + request.num_output_tokens
        assert request.num_prompt_tokens == len(request.prompt_token_ids)
        assert len(request.block_hashes) == request.num_tokens // block_size
        assert num_blocks == -(-num_held // block_size)
        if is_parked:
            assert (num_held, record.ledger.num_tokens) == (0, request.num_tokens)
        else:
            # The newest reply is not in the ledger yet, and the token that was sampled last is not computed.
            assert request.num_prompt_tokens <= num_held + 1
            assert record.ledger.num_tokens <= num_held
            assert num_held <= request.num_tokens <= num_held + 1

    def run_until(self, condition: Callable[[], bool], *, limit: int = 2000) -> None:
        """Step until the condition holds."""
        for _ in range(limit):
            if condition():
                return
            self.step()
        message = f"no end after {limit} steps"
        raise AssertionError(message)

    def is_answered(self, request_id: str) -> bool:
        return any(output.finish_reason is not None for output in self.outputs[request_id])

    def answer(self, request_id: str, *, on_step: Callable[[int], None] | None = None) -> Answer:
        """Step until the request's next boundary and return what was said; ``on_step`` gets the tokens so far."""
        while not self.is_answered(request_id):
            before = sum(len(output.new_token_ids) for output in self.outputs[request_id])
            if on_step is not None:
                on_step(before)
            self.step()
        outputs = self.outputs[request_id]
        end = next(i for i, output in enumerate(outputs) if output.finish_reason is not None) + 1
        self.outputs[request_id] = outputs[end:]
        return _as_answer(outputs[:end])

    def run_to_rest(self) -> None:
        """Step until nothing is left to compute."""
        self.run_until(lambda: not self.scheduler.has_requests())

    def preempt_everything(self) -> None:
        """The forced preemption of every oracle test."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def preemption_after(self, num_tokens: int | None) -> Callable[[int], None]:
        """Return an ``on_step`` that forces one preemption when a reply has so many tokens (None: never)."""
        points = [num_tokens]

        def preempt(done: int) -> None:
            if points and done == points[0]:
                points.clear()
                self.preempt_everything()

        return preempt

    def abort(self, request_id: str) -> None:
        self.core.abort_requests([request_id])

    def complete(
        self, tokens: Sequence[int], params: SamplingParams | None = None, *, request_id: str = "ordinary"
    ) -> Answer:
        """Answer an ordinary request."""
        self.send(request_id, tokens, params, resumable=False)
        return self.answer(request_id)

    def close(self) -> None:
        self.core.shutdown()


class SteppedSession:
    """A session on a stepped engine."""

    def __init__(
        self,
        engine: SteppedEngine,
        request_id: str,
        *,
        retention: Mapping[str, Any] | None,
        max_tokens: int = 4,
        priority: int = 0,
    ) -> None:
        self.engine, self.id, self.priority = engine, request_id, priority
        self.retention, self.max_tokens = retention, max_tokens

    def params(self, **more: Any) -> SamplingParams:
        extra = {} if self.retention is None else {"extra_args": {RETENTION_KEY: dict(self.retention)}}
        return greedy(**({"max_tokens": self.max_tokens} | extra | more))

    def send(self, tokens: Sequence[int], **params: Any) -> None:
        self.engine.send(self.id, tokens, self.params(**params), resumable=True, priority=self.priority)

    def push(self, tokens: Sequence[int], *, on_step: Callable[[int], None] | None = None, **params: Any) -> Answer:
        self.send(tokens, **params)
        return self.engine.answer(self.id, on_step=on_step)

    def rest(self) -> None:
        """Step until the session is idle (an idle consolidation may be under way)."""
        record = self.engine.scheduler.sessions.records.get(self.id)
        self.engine.run_until(lambda: record is None or record.is_idle)

    def close(self) -> None:
        self.engine.send(self.id, [0], self.params(), resumable=False)
        self.engine.run_to_rest()
        self.engine.outputs.pop(self.id, None)

    @property
    def record(self) -> Any:
        return self.engine.scheduler.sessions.records[self.id]


def _as_answer(outputs: Sequence[EngineCoreOutput]) -> Answer:
    tokens: list[int] = []
    logprobs: list[Mapping[int, float]] = []
    for output in outputs:
        tokens += output.new_token_ids
        if output.new_logprobs is not None:
            for ids, values in zip(output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs, strict=True):
                logprobs.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
    last = outputs[-1]
    params = last.kv_transfer_params or {}
    totals = CompactionTotals.from_wire(params)
    return Answer(
        token_ids=tuple(tokens),
        logprobs=tuple(logprobs),
        finish_reason=str(last.finish_reason),
        stop_reason=last.stop_reason,
        report=None if totals is not None else ChunkReport.from_wire(params),
        result=params.get(INTERNAL_KEY),
        totals=totals,
        prefill=next((output.prefill_stats for output in outputs if output.prefill_stats is not None), None),
    )

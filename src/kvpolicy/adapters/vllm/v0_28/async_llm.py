"""The engine facade: vLLM's own AsyncLLM with bounded sessions. It only translates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attrs import define
from vllm.exceptions import VLLMClientError
from vllm.outputs import STREAM_FINISHED
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM as StockAsyncLLM
from vllm.v1.executor.abstract import Executor

from kvpolicy.adapters.vllm.v0_28.collector import BoundaryCollector
from kvpolicy.adapters.vllm.v0_28.engine_args import checked_config, require_session_config, session_engine_args
from kvpolicy.adapters.vllm.v0_28.guards import sampling_errors
from kvpolicy.adapters.vllm.v0_28.metrics import CompactionCounters, CompactionStatLogger
from kvpolicy.adapters.vllm.v0_28.options import EngineOptions
from kvpolicy.adapters.vllm.v0_28.output_processor import SessionOutputProcessor, sendable
from kvpolicy.adapters.vllm.v0_28.session import Session
from kvpolicy.adapters.vllm.v0_28.sessions import retention_of
from kvpolicy.adapters.vllm.v0_28.turns import TurnEncoder
from kvpolicy.adapters.vllm.v0_28.wire import INTERNAL_KEY, RETENTION_KEY, ChunkMarker
from kvpolicy.core.budget import RetentionBudget
from kvpolicy.core.errors import ChunkRefusedError, PolicyUsageError, SessionClosedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.protocol import StreamingInput
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from kvpolicy.adapters.vllm.v0_28.wire import CompactionTotals

DEFAULT_REPLY_TOKENS = 24
_DEFAULT_RETENTION: Mapping[str, Any] = MappingProxyType({})
# Arguments of the stock class itself; every other one is an engine argument.
_CLASS_ARGUMENTS = frozenset(
    {"usage_context", "mm_registry", "log_requests", "start_engine_loop", "stat_loggers", "aggregate_engine_logging"}
    | {"client_addresses", "client_count", "client_index"}
)


class AsyncLLM(StockAsyncLLM):
    """vLLM's asynchronous engine, with ``open_session`` and ``kv_cache_policy``.

    Takes every argument of the stock engine (``AsyncEngineArgs`` and ``AsyncLLM``). Requests that are not sessions
    have the policy, or behave as on the stock engine where there is none.
    """

    # Of the class, because vLLM calls ``shutdown`` also where ``__init__`` has raised.
    _before_shutdown: Callable[[], None] | None = None

    def __init__(  # noqa: PLR0913 - one keyword for each option of ours
        self,
        model: str | None = None,
        *,
        max_sessions: int | None = None,
        kv_cache_policy: str | Mapping[str, Any] | None = None,
        vllm_config: VllmConfig | None = None,
        executor_class: type[Executor] | None = None,
        log_stats: bool | None = None,
        **arguments: Any,
    ) -> None:
        """Start an engine.

        Args:
            model: Hugging Face id or folder.
            max_sessions: open sessions at a time, below ``max_num_seqs``; unset: one less than it.
            kv_cache_policy: for every request that is no session and brings none in
                ``SamplingParams.extra_args["kv_cache_policy"]``: a name, or a mapping with its options such as
                ``{"type": "randkv", "budget": 2048}``. "off": requests are dense unless they bring one. Unset: all
                requests are dense and none can bring one.
            vllm_config: a ready configuration (from ``from_engine_args``) instead of engine arguments.
            executor_class: with ``vllm_config``; unset: the one that the configuration asks for.
            log_stats: as in the stock class; unset: not ``disable_log_stats``.
            **arguments: stock arguments.

        Raises:
            PolicyUsageError: every reason why sessions or the policy cannot run so, before a model is loaded.
        """
        own = {name: arguments.pop(name) for name in _CLASS_ARGUMENTS & arguments.keys()}
        if vllm_config is None:
            if model is not None:
                arguments["model"] = model
            log_stats = not arguments.get("disable_log_stats", False) if log_stats is None else log_stats
            vllm_config = checked_config(
                session_engine_args(arguments, max_sessions=max_sessions, kv_cache_policy=kv_cache_policy)
            )
        elif names := _given(arguments, model=model, max_sessions=max_sessions, kv_cache_policy=kv_cache_policy):
            reason = f"vllm_config: expected no engine arguments beside it, got {', '.join(names)}"
            raise PolicyUsageError(reason)
        else:
            require_session_config(vllm_config)
        self._handler_may_run = False
        # By the queue that vLLM's input task has; the consumer reads from another.
        self._streams: WeakKeyDictionary[RequestOutputCollector, _Stream] = WeakKeyDictionary()
        self._counters = CompactionCounters()
        if log_stats and EngineOptions.from_config(vllm_config).compacts:
            own["stat_loggers"] = [*(own.get("stat_loggers") or ()), CompactionStatLogger.factory(self._counters)]
        super().__init__(
            vllm_config, executor_class or Executor.get_class(vllm_config), log_stats=bool(log_stats), **own
        )
        # The output handler holds on to the processor it starts with, so ours must be there first.
        self.output_processor = SessionOutputProcessor.of_engine(self, self._counters)
        self._handler_may_run = True
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        self._run_output_handler()

    @property
    def compaction_totals(self) -> CompactionTotals:
        """Engine-wide counters, as of the last output."""
        return self._counters.totals

    def call_before_shutdown(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` once when the engine is told to stop, in whatever thread that happens."""
        self._before_shutdown = hook

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine."""
        hook, self._before_shutdown = self._before_shutdown, None
        if hook is not None:
            hook()
        super().shutdown(timeout)

    def open_session(
        self,
        *,
        system_prompt: str | None = None,
        retention: Mapping[str, Any] | None = _DEFAULT_RETENTION,
        sampling_params: SamplingParams | None = None,
        use_chat_template: bool | None = None,
        priority: int = 0,
    ) -> Session:
        """Return a session; the engine hears of it with its first push.

        Args:
            system_prompt: put before the first turn; stays for good (it is part of the pinned anchor).
            retention: budgets as in ``RetentionBudget``; unset: its defaults; None: nothing is ever evicted.
            sampling_params: for every chunk that brings none; unset: greedy, at most 24 tokens.
            use_chat_template: unset: if the model has one.
            priority: as in vLLM, smaller is more important; also decides which idle session is parked first.

        Raises:
            PolicyUsageError: every reason why such a session cannot be.
        """
        if type(priority) is not int:
            raise PolicyUsageError(f"priority: expected an integer, got {priority!r}")
        params = sampling_params or SamplingParams(temperature=0.0, max_tokens=DEFAULT_REPLY_TOKENS)
        if retention is not None:
            params = copy(params)
            params.extra_args = {**(params.extra_args or {}), RETENTION_KEY: dict(retention)}
        params = self.checked_session_params(params)
        encoder = TurnEncoder(self.renderer.tokenizer, system_prompt, use_chat_template)
        return Session(self, encoder, params, priority=priority)

    def checked_session_params(self, params: SamplingParams) -> SamplingParams:
        """Return a copy of a chunk's sampling parameters that reports deltas.

        Raises:
            PolicyUsageError: every reason why a session chunk cannot have them.
        """
        reasons = list(sampling_errors(params))
        try:
            retention = retention_of(params)
            if retention is not None:
                RetentionBudget.from_mapping(retention)
        except PolicyUsageError as error:
            reasons += error.reasons
        if reasons:
            raise PolicyUsageError(reasons)
        checked = copy(params)
        checked.output_kind = RequestOutputKind.DELTA
        return checked

    async def check_chunk(self, prompt: TokensPrompt, params: SamplingParams) -> None:
        """Raise if the engine would not even take in a chunk: in mid-stream that would end the session.

        Raises:
            ChunkRefusedError: it is longer than the context limit allows.
            PolicyUsageError: a token id or a parameter that this model cannot have.
        """
        num_tokens, limit = len(prompt["prompt_token_ids"]), self.model_config.max_model_len
        if num_tokens >= limit:
            message = f"chunk: expected fewer tokens than the context limit {limit}, got {num_tokens}; send it in parts"
            raise ChunkRefusedError("chunk_too_long", message)
        try:
            self.input_processor.process_inputs(
                request_id="check", prompt=prompt, params=params, supported_tasks=await self.get_supported_tasks()
            )
        except (ValueError, VLLMClientError) as error:
            raise PolicyUsageError(f"chunk: the engine refuses it: {error}") from error

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        """Add a request; the parameters of a session are checked before anything is sent."""
        if isinstance(prompt, AsyncGenerator):
            self.checked_session_params(params)
        return await super().add_request(request_id, prompt, sendable(params), *args, **kwargs)

    async def _checked_stream(
        self, stream: AsyncGenerator[StreamingInput, None], replies: BoundaryCollector
    ) -> AsyncGenerator[StreamingInput, None]:
        """Pass a stream's chunks on: checked, and no further one while too many replies are unread."""
        async with aclosing(stream):
            async for chunk in stream:
                if chunk.sampling_params is not None:
                    self.checked_session_params(chunk.sampling_params)
                yield chunk
                await replies.room()

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:  # noqa: FBT001, FBT002 - stock signature
        """Abort requests. The input of a stream ends first, so that nothing comes after the abort."""
        given = [request_id] if isinstance(request_id, str) else list(request_id)
        ids = set(given)
        if not internal:
            external = self.output_processor.external_req_ids
            ids = {internal_id for external_id in ids for internal_id in external.get(external_id, ())}
        try:
            for stream in list(self._streams.values()):
                if stream.replies.request_id in ids:
                    await stream.replies.stop_input()
        finally:
            await super().abort(given, internal)

    async def _add_streaming_input_request(
        self,
        request_id: str,
        input_stream: AsyncGenerator[StreamingInput, None],
        sampling_params: SamplingParams,
        *args: Any,
        **kwargs: Any,
    ) -> RequestOutputCollector:
        replies = BoundaryCollector(sampling_params.output_kind)
        stream = self._checked_stream(input_stream, replies)
        queue = await super()._add_streaming_input_request(request_id, stream, sampling_params, *args, **kwargs)
        # The input task has been made but has not run yet, so this comes before its first chunk.
        replies.adopt(queue)
        self._streams[queue] = _Stream(replies)
        return replies

    async def _add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: Any,
        index: int,
        queue: RequestOutputCollector,
    ) -> None:
        """Send one message to the engine core, marked with its place if it belongs to a session."""
        stream = self._streams.get(queue)
        if stream is None:
            _without_marker(request)
        elif not self._may_send(stream, request, queue.output):
            return
        else:
            request.sampling_params = copy(request.sampling_params)
            marker = ChunkMarker(stream.num_sent, final=not request.resumable)
            request.sampling_params.extra_args = marker.to_extra_args(request.sampling_params.extra_args)
            stream.num_sent += 1
            queue = stream.replies
        await super()._add_request(request, prompt, parent_req, index, queue)

    def _may_send(self, stream: _Stream, request: EngineCoreRequest, failure: Any) -> bool:
        """Whether a message of a stream is to be sent; tell the consumer of what ended its input.

        Raises:
            SessionClosedError: the session has ended meanwhile: nothing may be sent that could bring it back.
        """
        is_final = not request.resumable
        if is_final and isinstance(failure, Exception):
            # What the stream, or the check of a chunk, has raised; vLLM's input task left it in its own queue.
            stream.replies.put(failure)
        if stream.num_sent > 0 and request.request_id not in self.output_processor.request_states:
            if not is_final:
                raise SessionClosedError("session: it has ended; open a new one")
            return False
        if stream.num_sent == 0 and is_final:
            stream.replies.put(STREAM_FINISHED)  # no chunk ever came: no engine work
            return False
        return True

    def _run_output_handler(self) -> None:
        if self._handler_may_run:
            super()._run_output_handler()


@define
class _Stream:
    """A stream of chunks: where its replies go, and the messages sent so far."""

    replies: BoundaryCollector
    num_sent: int = 0


def _given(arguments: Mapping[str, Any], **named: Any) -> list[str]:
    """Return the names of the arguments that were given, sorted."""
    return sorted({*arguments, *(name for name, value in named.items() if value is not None)})


def _without_marker(request: EngineCoreRequest) -> None:
    """Strip our own key from an ordinary request: only the facade may set it."""
    params = request.sampling_params
    if params is not None and params.extra_args and INTERNAL_KEY in params.extra_args:
        request.sampling_params = copy(params)
        request.sampling_params.extra_args = {k: v for k, v in params.extra_args.items() if k != INTERNAL_KEY}

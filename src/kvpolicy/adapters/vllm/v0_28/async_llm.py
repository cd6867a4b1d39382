"""The engine facade: vLLM's own AsyncLLM with bounded sessions. It only translates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from copy import copy, deepcopy
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.outputs import STREAM_FINISHED
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM as StockAsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.abstract import Executor

from kvpolicy.adapters.vllm.v0_28.collector import BoundaryCollector
from kvpolicy.adapters.vllm.v0_28.engine_args import checked_config, session_config_errors
from kvpolicy.adapters.vllm.v0_28.guards import sampling_errors
from kvpolicy.adapters.vllm.v0_28.metrics import CompactionCounters, CompactionStatLogger
from kvpolicy.adapters.vllm.v0_28.options import EngineOptions
from kvpolicy.adapters.vllm.v0_28.output_processor import RequestRefusedError, SessionOutputProcessor, sendable
from kvpolicy.adapters.vllm.v0_28.routing import counted_once, rank_of
from kvpolicy.adapters.vllm.v0_28.session import Session
from kvpolicy.adapters.vllm.v0_28.sessions import retention_of
from kvpolicy.adapters.vllm.v0_28.streams import InputStream
from kvpolicy.adapters.vllm.v0_28.turns import TurnEncoder
from kvpolicy.adapters.vllm.v0_28.wire import INTERNAL_KEY, RETENTION_KEY, rehearse
from kvpolicy.core.budget import RetentionBudget
from kvpolicy.core.checks import reject
from kvpolicy.core.errors import PolicyUsageError, SessionClosedError
from kvpolicy.core.fold import Refuse

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from kvpolicy.adapters.vllm.v0_28.request_guards import RequestGuard
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
            vllm_config = checked_config(arguments, max_sessions=max_sessions, kv_cache_policy=kv_cache_policy)
        elif names := _given(arguments, model=model, max_sessions=max_sessions, kv_cache_policy=kv_cache_policy):
            reason = f"vllm_config: expected no engine arguments beside it, got {', '.join(names)}"
            raise PolicyUsageError(reason)
        else:
            reject(session_config_errors(vllm_config))
        self._handler_may_run = False
        # Those whose input has not ended, by the queue that vLLM's input task has; the consumer reads from another.
        self._streams: dict[RequestOutputCollector, InputStream] = {}
        # Streams that are being closed: the event loop alone would forget them.
        self._closing: set[asyncio.Future[None]] = set()
        self._counters = CompactionCounters()
        if log_stats and EngineOptions.from_config(vllm_config).compacts:
            own["stat_loggers"] = [*(own.get("stat_loggers") or ()), CompactionStatLogger.factory(self._counters)]
        super().__init__(
            vllm_config, executor_class or Executor.get_class(vllm_config), log_stats=bool(log_stats), **own
        )
        # The output handler holds on to the processor it starts with, so ours must be there first.
        self.output_processor = SessionOutputProcessor.of_engine(self, self._counters, streams=self._streams)
        self._handler_may_run = True
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        self._run_output_handler()

    @property
    def request_guard(self) -> RequestGuard:
        """What requests must respect."""
        return self.output_processor.request_guard

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
        handler = getattr(self, "output_handler", None)
        super().shutdown(timeout)
        # In stock vLLM whoever waits for an output then waits for ever.
        if handler is not None and not handler.get_loop().is_closed():
            handler.get_loop().call_soon_threadsafe(self.output_processor.propagate_error, EngineDeadError())

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
        return Session(self, self.turn_encoder(system_prompt, use_chat_template), params, priority=priority)

    def turn_encoder(
        self,
        system_prompt: str | None,
        use_chat_template: bool | None = None,  # noqa: FBT001 - as above
        *,
        most_tokens: int | None = None,
    ) -> TurnEncoder:
        """Return what makes tokens of a session's turns; one that has more than ``most_tokens`` need not be encoded.

        Raises:
            PolicyUsageError: a chat template is wanted and the model has none.
        """
        limit = self.model_config.max_model_len
        max_chars = min(limit, most_tokens or limit) * self.renderer.tokenizer.max_chars_per_token
        return TurnEncoder(self._turn_tokenizer, system_prompt, use_chat_template, max_chars=max_chars)

    @cached_property
    def _turn_tokenizer(self) -> Any:
        """A tokenizer of our own: long turns are encoded in threads, and vLLM changes the settings of its own one."""
        return deepcopy(self.renderer.tokenizer)

    def checked_session_params(self, params: SamplingParams) -> SamplingParams:
        """Return a copy of a chunk's sampling parameters that reports deltas.

        Raises:
            PolicyUsageError: every reason why a session chunk cannot have them.
        """
        reasons = [*sampling_errors(params), *self.request_guard.parameter_errors(params, in_session=True)]
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

    async def _ready(self, chunk: StreamingInput, params: SamplingParams) -> StreamingInput | Refuse:
        """Return a chunk as it is to be sent, or why the engine would not take it in.

        Found here, that costs the chunk and not the session (vLLM processes the chunk once more when it is sent). Its
        parameters are a copy, with the stream's kind of outputs; ``params`` are for a chunk that brings none.
        """
        try:
            own = deepcopy(chunk.sampling_params or params)
            own.output_kind = params.output_kind
            ready = StreamingInput(prompt=chunk.prompt, sampling_params=own)
            return await self._refusal(ready) or ready
        except Exception as error:  # noqa: BLE001 - whatever a caller puts into a chunk is that chunk's trouble alone
            return Refuse("unusable_chunk", f"chunk: the engine refuses it: {type(error).__name__}: {error}")

    async def _refusal(self, chunk: StreamingInput) -> Refuse | None:
        """Return why the engine would not take a chunk in, or None; whatever else is wrong with it is raised."""
        try:
            self.checked_session_params(chunk.sampling_params)
        except PolicyUsageError as error:
            return Refuse("unsupported_parameters", str(error))
        tokens = chunk.prompt.get("prompt_token_ids") if isinstance(chunk.prompt, Mapping) else None
        limit = self.model_config.max_model_len
        if tokens is not None and len(tokens) == 0:
            return Refuse("empty_chunk", "chunk: expected at least one token, got none")
        if tokens is not None and len(tokens) >= limit:
            message = (
                f"chunk: expected fewer than {limit} tokens (the context limit), got {len(tokens)}; send it in parts"
            )
            return Refuse("chunk_too_long", message)
        request = self.input_processor.process_inputs(
            request_id="check",
            prompt=chunk.prompt,
            params=chunk.sampling_params,
            supported_tasks=await self.get_supported_tasks(),
        )
        if request.prompt_embeds is not None:
            return Refuse("unusable_chunk", "chunk: expected tokens or text, got embeddings")
        if reasons := self.request_guard.errors(request):
            return Refuse("unusable_chunk", "\n".join(reasons))
        rehearse(request)
        return None

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        """Add a request; the parameters of a session are checked before anything is sent.

        Raises:
            RequestRefusedError: every reason why a session, or a request, cannot have them.
        """
        if isinstance(prompt, AsyncGenerator):
            ready = await self._ready(StreamingInput(prompt=TokensPrompt(prompt_token_ids=[0])), params)
            if isinstance(ready, Refuse):
                raise RequestRefusedError(ready.message.splitlines())
            params = ready.sampling_params
        return await super().add_request(request_id, prompt, sendable(params), *args, **kwargs)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:  # noqa: FBT001, FBT002 - stock signature
        """Abort requests. The input of a stream ends first, so that nothing comes after the abort."""
        given = [request_id] if isinstance(request_id, str) else list(request_id)
        streams = [stream for stream in self._streams.values() if stream.name(internal=internal) in given]
        try:
            caller = asyncio.current_task()
            await asyncio.gather(*(stream.stop(caller) for stream in streams))
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
        stream = InputStream(request_id, BoundaryCollector(sampling_params.output_kind), sampling_params)
        chunks = stream.checked(input_stream, partial(self._ready, params=sampling_params))
        queue = await super()._add_streaming_input_request(request_id, chunks, sampling_params, *args, **kwargs)
        # The input task has been made but has not run yet, so this comes before its first chunk.
        self._streams[queue] = stream
        stream.replies.adopt(queue).add_done_callback(lambda _: self._input_done(queue, chunks))
        return stream.replies

    def _input_done(self, queue: RequestOutputCollector, chunks: AsyncGenerator[StreamingInput, None]) -> None:
        self._streams.pop(queue).input_ended()
        # The input task does not close what it reads from, and an error of sending a chunk keeps it alive.
        closing = asyncio.ensure_future(chunks.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

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
            await super()._add_request(request, prompt, parent_req, index, queue)
        elif self._may_send(stream, request, queue.output):
            stream.mark(request)
            with counted_once(self.engine_core, request.request_id):
                await super()._add_request(request, prompt, parent_req, index, stream.replies)
            stream.rank = rank_of(self.engine_core, request.request_id)

    def _may_send(self, stream: InputStream, request: EngineCoreRequest, failure: Any) -> bool:
        """Whether a message of a stream is to be sent; tell the consumer of what ended its input.

        Raises:
            SessionClosedError: the session has ended meanwhile: nothing may be sent that could bring it back.
        """
        is_final = not request.resumable
        if is_final:
            stream.is_complete = True
            stream.replies.let_input_be()
            if isinstance(failure, Exception) and not stream.is_stopped:
                # What the stream has raised; vLLM's input task left it in its own queue.
                stream.replies.put(failure)
        has_ended = stream.is_known and request.request_id not in self.output_processor.request_states
        if has_ended or stream.is_stopped:
            if not is_final:
                raise SessionClosedError("session: it has ended; open a new one")
            return False
        if not stream.is_known and is_final:
            stream.replies.put(STREAM_FINISHED)  # no chunk was ever sent: no engine work
            return False
        return True

    def _run_output_handler(self) -> None:
        if self._handler_may_run:
            super()._run_output_handler()


def _given(arguments: Mapping[str, Any], **named: Any) -> list[str]:
    """Return the names of the arguments that were given, sorted."""
    return sorted({*arguments, *(name for name, value in named.items() if value is not None)})


def _without_marker(request: EngineCoreRequest) -> None:
    """Strip our own key from an ordinary request: only the facade may set it."""
    params = request.sampling_params
    if params is not None and params.extra_args and INTERNAL_KEY in params.extra_args:
        request.sampling_params = copy(params)
        request.sampling_params.extra_args = {k: v for k, v in params.extra_args.items() if k != INTERNAL_KEY}

"""The front end's half of requests: keys and checks for policies; for sessions, state that does not grow with age."""

from __future__ import annotations

from collections import deque
from copy import copy
from typing import TYPE_CHECKING, Any, Self

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine.output_processor import (
    OutputProcessor,
    OutputProcessorOutput,
    RequestOutputCollector,
    RequestState,
    StreamingUpdate,
)

from kvpolicy.adapters.vllm.v0_28.compactions import admission_of
from kvpolicy.adapters.vllm.v0_28.options import POLICY_KEY
from kvpolicy.adapters.vllm.v0_28.progress import RequestProgress
from kvpolicy.adapters.vllm.v0_28.request_guards import RequestGuard, reading_errors
from kvpolicy.adapters.vllm.v0_28.wire import TERMINAL, CompactionTotals, RequestKey
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.policy_options import as_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.outputs import CompletionOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

    from kvpolicy.adapters.vllm.v0_28.compactions import PolicyAdmission
    from kvpolicy.adapters.vllm.v0_28.metrics import CompactionCounters
    from kvpolicy.adapters.vllm.v0_28.streams import InputStream


class RequestRefusedError(PolicyUsageError, VLLMClientError):
    """The engine cannot compute a request, or not with the policy it has; to vLLM's own server a client's mistake."""


class PolicyOutputProcessor(OutputProcessor):
    """The stock output processor; every request passes it on its way out, and every output on its way back.

    A request that the engine would refuse, or die of, is refused here, before anything is sent; one that has a policy
    gets the key that the policy draws by. Engine-wide counters are taken out of the outputs.
    """

    def __init__(
        self,
        *args: Any,
        admission: PolicyAdmission,
        request_guard: RequestGuard,
        counters: CompactionCounters,
        **kwargs: Any,
    ) -> None:
        """Build the stock processor."""
        super().__init__(*args, **kwargs)
        self.admission = admission
        self.request_guard = request_guard
        self._counters = counters

    @classmethod
    def of_engine(cls, engine: Any, counters: CompactionCounters, **own: Any) -> Self:
        """Return the processor that takes the place of a started front end's own (``LLMEngine`` or ``AsyncLLM``).

        ``own`` are the arguments of a subclass.
        """
        config = engine.vllm_config
        return cls(
            engine.renderer.tokenizer,
            log_stats=engine.log_stats,
            stream_interval=config.scheduler_config.stream_interval,
            tracing_enabled=config.observability_config.otlp_traces_endpoint is not None,
            admission=admission_of(config),
            request_guard=RequestGuard.of(config.model_config),
            counters=counters,
            **own,
        )

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: Any = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Register a request.

        Raises:
            RequestRefusedError: every reason why the engine cannot read it, cannot compute it, or cannot serve it with
                the policy it has.
        """
        params = request.sampling_params
        progress = None
        live = self.request_states.get(request.request_id)
        if live is not None and not live.streaming_input and not request.resumable:
            raise RequestRefusedError(f"request_id: {request.request_id!r} is the id of a request that is running")
        if not request.resumable and live is None:
            reasons = (*self.request_guard.errors(request), *reading_errors(request))
            if reasons:
                raise RequestRefusedError(reasons)
        if params is not None and not request.resumable and live is None:
            key = RequestKey.from_extra_args(params.extra_args) or request.external_req_id or request.request_id
            if parent_req is not None:
                key = f"{key}/{request_index}"
            try:
                record = self.admission.admit(
                    params.extra_args,
                    prompt_length=length_from_prompt_token_ids_or_embeds(
                        request.prompt_token_ids, request.prompt_embeds
                    ),
                    max_tokens=params.max_tokens,
                    request_key=key,
                )
            except PolicyUsageError as error:
                raise RequestRefusedError(error.reasons) from None
            if record is not None:
                request.sampling_params = copy(params)
                request.sampling_params.extra_args = RequestKey(key).to_extra_args(params.extra_args)
                progress = RequestProgress(record.prompt_length, record.bound)
        super().add_request(request, prompt, parent_req, request_index, queue)
        if progress is not None:
            # With the request's own state, so that it goes when that goes.
            self.request_states[request.request_id].compaction = progress

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
    ) -> OutputProcessorOutput:
        """Process outputs; the totals that some of them carry are kept for the counters.

        A stop string ends a request here and not in the engine, so each output says how far its request is.
        """
        for output in engine_core_outputs:
            if output.kv_transfer_params is not None:
                totals = CompactionTotals.from_wire(output.kv_transfer_params)
                if totals is not None:
                    self._counters.totals = totals
            progress = getattr(self.request_states.get(output.request_id), "compaction", None)
            if progress is not None:
                output.kv_transfer_params = progress.with_output(output)
        return super().process_outputs(engine_core_outputs, engine_core_timestamp, iteration_stats)


class ChunkUpdate(StreamingUpdate):
    """A queued chunk together with the request that brought it."""

    chunk: EngineCoreRequest


class SessionRequestState(RequestState):
    """Front-end state of a session: it is that of the current chunk alone.

    The stock state keeps the prompt, the token ids, the detokenizer and the log-probabilities of the whole session.
    """

    template: Any = None

    def _new_completion_output(
        self, token_ids: list[int], finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> CompletionOutput:
        """Return a piece of a reply; one without tokens has no log-probabilities (the stock one repeats them all)."""
        output = super()._new_completion_output(token_ids, finish_reason, stop_reason)
        if not token_ids and output.logprobs and self.output_kind == RequestOutputKind.DELTA:
            output.logprobs = output.logprobs[:0]
        return output

    def apply_streaming_update(self, update: StreamingUpdate) -> None:
        """Start the next chunk with fresh text, tokens, log-probabilities and statistics."""
        fresh = type(self).from_new_request(
            tokenizer=self.template.tokenizer,
            request=update.chunk,
            prompt=update.prompt,
            parent_req=None,
            request_index=0,
            queue=self.queue,
            log_stats=self.template.log_stats,
            stream_interval=self.template.stream_interval,
        )
        kept = {"streaming_input": not update.final, "input_chunk_queue": self.input_chunk_queue}
        self.__dict__.update(vars(fresh), **kept, template=self.template)


class SessionOutputProcessor(PolicyOutputProcessor):
    """The output processor with per-chunk state for sessions and terminal ABORT and ERROR."""

    def __init__(self, *args: Any, streams: Mapping[RequestOutputCollector, InputStream], **kwargs: Any) -> None:
        """Build the processor; ``streams`` are those of the engine whose input has not ended."""
        super().__init__(*args, **kwargs)
        self._streams = streams

    def propagate_error(self, e: Exception) -> None:
        """Tell every consumer that the engine is gone, those of streams that it never heard of as well."""
        super().propagate_error(e)
        for stream in list(self._streams.values()):
            if stream.replies.request_id not in self.request_states:
                stream.replies.put(e)

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: Any = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Register a request; a session's first chunk gets a session state."""
        if not request.resumable or request.request_id in self.request_states:
            super().add_request(request, prompt, parent_req, request_index, queue)
            return
        state = SessionRequestState.from_new_request(
            tokenizer=self.tokenizer,
            request=request,
            prompt=prompt,
            parent_req=parent_req,
            request_index=request_index,
            queue=queue,
            log_stats=self.log_stats,
            stream_interval=self.stream_interval,
        )
        state.template = self
        self.request_states[request.request_id] = state
        self.external_req_ids[state.external_req_id].append(request.request_id)

    def _update_streaming_request_state(
        self, req_state: RequestState, request: EngineCoreRequest, prompt: str | None
    ) -> None:
        if not request.resumable or not isinstance(req_state, SessionRequestState):
            super()._update_streaming_request_state(req_state, request, prompt)
            return
        update = ChunkUpdate(
            prompt=prompt, prompt_token_ids=request.prompt_token_ids, arrival_time=request.arrival_time
        )
        update.chunk = request
        if req_state.input_chunk_queue is None:
            req_state.input_chunk_queue = deque()
            req_state.apply_streaming_update(update)
        else:
            req_state.input_chunk_queue.append(update)

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
    ) -> OutputProcessorOutput:
        """Process outputs; ABORT and ERROR end a session, and are sent back to the engine core.

        Not before their turn: the end of a reply that comes before them in the same batch is still a boundary.
        """
        processed = OutputProcessorOutput(request_outputs=[], reqs_to_abort=[])

        def process(outputs: list[EngineCoreOutput]) -> None:
            part = super(SessionOutputProcessor, self).process_outputs(outputs, engine_core_timestamp, iteration_stats)
            processed.request_outputs.extend(part.request_outputs)
            processed.reqs_to_abort.extend(part.reqs_to_abort)

        done = 0
        for i, output in enumerate(engine_core_outputs):
            if output.finish_reason not in TERMINAL:
                continue
            process(engine_core_outputs[done:i])
            done = i
            state = self.request_states.get(output.request_id)
            if state is not None and state.streaming_input:
                state.streaming_input = False
                state.input_chunk_queue = None
                processed.reqs_to_abort.append(output.request_id)
        process(engine_core_outputs[done:])
        return processed


def sendable(params: Any) -> Any:
    """Return parameters whose policy is a text, so that it can be copied and sent; others as they are.

    Raises:
        RequestRefusedError: the policy is nothing that JSON has.
    """
    policy = (getattr(params, "extra_args", None) or {}).get(POLICY_KEY)
    if policy is None:
        return params
    sent = copy(params)
    try:
        sent.extra_args = {**params.extra_args, POLICY_KEY: as_text(policy)}
    except PolicyUsageError as error:
        raise RequestRefusedError(error.reasons) from None
    return sent

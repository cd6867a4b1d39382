"""vLLM's scheduler with bounded sessions: every hook calls the session book and moves requests between the queues."""

from __future__ import annotations

import secrets
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from attrs import evolve
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from kvpolicy.adapters.vllm.v0_28.compaction_scheduler import CompactionScheduler
from kvpolicy.adapters.vllm.v0_28.engine_state import chunk_of
from kvpolicy.adapters.vllm.v0_28.guards import SESSIONS, cache_errors, config_errors
from kvpolicy.adapters.vllm.v0_28.log import LoggedEvents, log_fault
from kvpolicy.adapters.vllm.v0_28.options import EngineOptions
from kvpolicy.adapters.vllm.v0_28.sessions import SessionBook, SessionRecord, grammar_error
from kvpolicy.adapters.vllm.v0_28.wire import STOP_PREFIX, ChunkMarker, StepDirective
from kvpolicy.core.budget import SessionLimits
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.events import ChunkRefused
from kvpolicy.core.fold import Refuse
from kvpolicy.core.ranking import rank_idle_sessions
from kvpolicy.core.spaces import blocks_for
from kvpolicy.core.states import SessionState

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput


class SessionScheduler(CompactionScheduler):
    """The scheduler with policies, plus sessions.

    A request is a session if it is resumable. Everything else takes the path of its policy, or the stock one (R.4). All
    edits of a session happen while it is not running: when a chunk is folded, when it is parked, when it is
    consolidated while idle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the stock scheduler, then the session book.

        Raises:
            PolicyUsageError: every reason why sessions cannot run in this engine.
        """
        super().__init__(*args, **kwargs)
        block_size = self.block_size
        reasons = config_errors(self.vllm_config) + cache_errors(
            self.vllm_config, self.kv_cache_config, self.hash_block_size, block_size, SESSIONS
        )
        if reasons:
            raise PolicyUsageError(reasons)
        options = EngineOptions.from_config(self.vllm_config)
        blocks = self.compactions.blocks
        self.sessions = SessionBook(
            blocks=blocks,
            limits=SessionLimits(
                block_size=block_size,
                context_limit=self.max_model_len,
                trained_range=options.trained_range(self.vllm_config),
                num_pool_blocks=blocks.num_pool_blocks,
            ),
            request_guard=self.request_guard,
            max_sessions=options.max_sessions or self.max_num_running_reqs - 1,
            events=LoggedEvents(),
            salt=lambda: secrets.token_hex(16),
            records={},
        )
        # Sessions whose reply has ended, or whose idle consolidation has been computed, in the step being processed.
        self._settling: list[SessionRecord] = []
        self._reports: dict[str, dict[str, Any]] = {}
        # Sessions of this step whose grammar has rejected a token.
        self._rejecting: set[str] = set()

    # -- messages from the front end --------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Take a new request, a session's next chunk, or a session's end of input."""
        record = self.sessions.records.get(request.request_id)
        marker = ChunkMarker.of(request.sampling_params)
        if record is None and not request.resumable and (marker is None or not marker.final):
            super().add_request(request)
            return
        self._guarded(request, partial(self._take, request, record, marker))

    def _take(self, request: Request, record: SessionRecord | None, marker: ChunkMarker | None) -> None:
        if record is None:
            self._open(request, marker)
            return
        update = chunk_of(request)
        if update is None and (record.is_idle or record.discards_sample) and not record.request.streaming_queue:
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        elif not record.is_idle:
            record.request.streaming_queue.append(update)
        else:
            self._leave_idle(record)
            record.request.streaming_queue.append(update)
            self._settle(record)

    def _open(self, request: Request, marker: ChunkMarker | None) -> None:
        if marker is not None and (marker.final or not marker.first):
            # On its way when its session ended: it must not come back as a request that nobody can abort.
            refusal = Refuse("session_ended", "this session has already ended")
            if not marker.final:
                self.sessions.events.emit(
                    ChunkRefused(request_id=request.request_id, code=refusal.code, message=refusal.message)
                )
            self._answer(request, FinishReason.ABORT, refusal)
            return
        if request.request_id in self.requests:
            self._answer(request, FinishReason.ERROR, Refuse("id_in_use", "another request has this id"))
            return
        try:
            self.sessions.open(request)
        except PolicyUsageError as error:
            self._answer(request, FinishReason.ERROR, Refuse("not_admitted", str(error)))
            return
        super().add_request(request)

    # -- one step ---------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: FBT001, FBT002 - stock signature
        """Make room by parking idle sessions if need be, then schedule as usual."""
        if self.sessions.records:
            try:
                self._relieve_pressure()
            except Exception:  # noqa: BLE001 - parking helps, but no session may stop a step
                log_fault("parking.failed")
        return super().schedule(throttle_prefills)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process a step; a grammar that cannot be compiled costs a session the chunk that brought it."""
        for request_id in self.grammar_compile_error_reqs & self.sessions.records.keys():
            self.grammar_compile_error_reqs.discard(request_id)
            record = self.sessions.records[request_id]
            self._guarded(record.request, partial(self._withdraw, record))
        return super().update_from_output(scheduler_output, model_runner_output)

    def _withdraw(self, record: SessionRecord) -> None:
        """Answer the folded chunk that waits for a grammar in vain, and let the session go on without it."""
        request = record.request
        message = grammar_error(request.structured_output_request.grammar)
        if record.ledger.num_chunks == 1:
            # There is nothing to go back to.
            self._end(request, Refuse("grammar_failed", message))
            return
        self._leave_waiting(request)
        refusal = Refuse("unsupported_parameters", message)
        self.sessions.withdraw(record, refusal)
        self._answer_refused(record, refusal)
        self._settle(record)

    def _directive(self, scheduler_output: SchedulerOutput) -> StepDirective:
        directive = super()._directive(scheduler_output)
        if not self.sessions.records:
            return directive
        shifts: dict[str, int] = {}
        for request_id in scheduler_output.num_scheduled_tokens:
            record = self.sessions.records.get(request_id)
            if record is not None:
                self._guarded(record.request, partial(self._add_shift, shifts, record))
        return evolve(directive, rope_shifts=shifts)

    def _add_shift(self, shifts: dict[str, int], record: SessionRecord) -> None:
        shift = self.sessions.rope_shift(record)
        if shift:
            shifts[record.request.request_id] = shift

    def _update_request_with_output(
        self,
        request: Request,
        new_token_ids: list[int],
        is_stale: bool = False,  # noqa: FBT001, FBT002 - stock signature
    ) -> tuple[list[int], bool]:
        record = self.sessions.records.get(request.request_id)
        if record is not None:
            if record.discards_sample:
                # The window has been computed again; the token that its prefill sampled answers nothing.
                self._settling.append(record)
                return [], False
            if record.state is SessionState.PREFILLING and not self._guarded(
                request, partial(self.sessions.first_token, record)
            ):
                return [], False
        tokens, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        return tokens, stopped

    def _handle_stopped_request(self, request: Request) -> bool:
        record = self.sessions.records.get(request.request_id)
        if record is None:
            return bool(super()._handle_stopped_request(request))
        if request.status == RequestStatus.FINISHED_ERROR:
            # Its grammar has rejected a token: that ends the reply, not the session (R.21).
            request.resumable = True
            self._rejecting.add(request.request_id)
        ended = bool(request.streaming_queue) and request.streaming_queue[0] is None
        settled = self._guarded(
            request, lambda: self._reports.update({request.request_id: self.sessions.stopped(record).to_wire()})
        )
        if ended or not settled:
            return True
        # The next chunk is folded only when this step's outputs are built: they still read the stop reason and the
        # sampling parameters of the chunk that has ended.
        request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        self._settling.append(record)
        return False

    def _after_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Let the sessions that came to rest in this step go on."""
        super()._after_outputs(outputs)
        if self._reports:
            self._attach_reports(outputs)
        settling, self._settling = self._settling, []
        for record in settling:
            self._guarded(record.request, partial(self._come_to_rest, record))

    def _attach_reports(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        reports, self._reports = self._reports, {}
        rejecting, self._rejecting = self._rejecting, set()
        for output in chain.from_iterable(batch.outputs for batch in outputs.values()):
            if output.finish_reason is not None and output.request_id in reports:
                output.kv_transfer_params = reports[output.request_id]
                if output.request_id in rejecting:
                    output.finish_reason = FinishReason.STOP
                    output.stop_reason = STOP_PREFIX + "grammar_rejected"
                    output.new_token_ids, output.new_logprobs = [], None

    def _come_to_rest(self, record: SessionRecord) -> None:
        request = record.request
        if request.is_finished() or request.request_id not in self.requests:
            return
        if record.discards_sample:
            self.running.remove(request)
            request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
            self.sessions.consolidated(record)
        self._settle(record)

    def _settle(self, record: SessionRecord) -> None:
        """Fold the next queued chunk of a session that is at rest and in no queue, or make it wait for one."""
        request = record.request
        while request.streaming_queue:
            update = request.streaming_queue.popleft()
            if update is None:
                request.status = RequestStatus.WAITING
                self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
                return
            refusal = self.sessions.fold(record, update)
            if refusal is None:
                waits_for_grammar = request.use_structured_output
                self._enqueue(
                    request,
                    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR if waits_for_grammar else RequestStatus.WAITING,
                )
                return
            if record.budget is None and refusal.code == "context_exhausted":
                # Nothing bounds this session, so nothing can make room for it.
                self._end(request, refusal)
                return
            self._answer_refused(record, refusal)
        if self.sessions.consolidate_if_due(record):
            self._enqueue(request, RequestStatus.WAITING)
        elif record.state is SessionState.PARKED:
            # In no queue: it holds neither blocks nor a slot, and must not keep the engine stepping.
            request.status = RequestStatus.PREEMPTED
        else:
            self.num_waiting_for_streaming_input += 1
            self._enqueue(request, RequestStatus.WAITING_FOR_STREAMING_REQ)

    def _answer_refused(self, record: SessionRecord, refusal: Refuse) -> None:
        """Answer a chunk that the session goes on without."""
        report = self.sessions.report(record, refusal)
        self._answer(record.request, FinishReason.LENGTH, refusal, report.to_wire())

    def _enqueue(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        self._enqueue_waiting_request(request)

    def _leave_waiting(self, request: Request) -> None:
        """Take a request out of whichever queue it waits in."""
        self.waiting.remove_requests([request])
        self.skipped_waiting.remove_requests([request])

    def _leave_idle(self, record: SessionRecord) -> None:
        """Take an idle session out of its queue."""
        if record.state is SessionState.IDLE:
            self.skipped_waiting.remove_requests([record.request])
            self.num_waiting_for_streaming_input -= 1

    # -- preemption, parking, the end -------------------------------------------------------------------------------

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:  # noqa: FBT001, FBT002 - stock signature
        super()._preempt_request(request, timestamp, drop_stale_output)
        record = self.sessions.records.get(request.request_id)
        if record is not None:
            self._guarded(request, partial(self.sessions.preempted, record))

    def _relieve_pressure(self) -> None:
        """Park the least valuable sessions if the next request to be scheduled lacks blocks or a slot."""
        head = self._next_waiting()
        if head is not None and self._gives_up_consolidation(head):
            head = self._next_waiting()
        candidates = {
            request_id: record
            for request_id, record in self.sessions.records.items()
            if record.request is not head and self._can_park(record)
        }
        if not candidates:
            return
        for request_id in self._parking_victims(head, candidates):
            record = candidates[request_id]
            self._guarded(record.request, partial(self._park, record))

    def _gives_up_consolidation(self, head: Request) -> bool:
        """Park a session that consolidates ahead of time but lacks the blocks for it; return whether that was done.

        That work can wait for the session's next chunk; it must neither take blocks from others nor keep those behind
        it waiting.
        """
        record = self.sessions.records.get(head.request_id)
        if record is None or not record.discards_sample or self._missing_blocks(head) <= 0:
            return False
        self._leave_waiting(head)
        return self._guarded(head, partial(self._park_consolidating, record))

    def _park_consolidating(self, record: SessionRecord) -> None:
        self.sessions.park(record)
        self._settle(record)

    def _next_waiting(self) -> Request | None:
        """Return the request that the engine will try to schedule first, idle sessions apart."""
        waiting = (
            request
            for request in chain(self.skipped_waiting, self.waiting)
            if request.status != RequestStatus.WAITING_FOR_STREAMING_REQ
        )
        return min(waiting, default=None) if self.policy == SchedulingPolicy.PRIORITY else next(waiting, None)

    def _can_park(self, record: SessionRecord) -> bool:
        waiting = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
        waits_with_blocks = record.state is SessionState.PREFILLING and record.request.status in waiting
        holds = self.sessions.blocks.num_blocks(record.request.request_id) > 0
        return holds and (record.state is SessionState.IDLE or waits_with_blocks)

    def _parking_victims(self, head: Request | None, candidates: dict[str, SessionRecord]) -> list[str]:
        sessions = [self.sessions.as_idle(record) for record in candidates.values()]
        # Where nothing helps the waiting request, the running ones still come before idle sessions.
        victims_of = (rank_idle_sessions(sessions, self._missing_blocks(request)) for request in (head, None))
        victims = [session.request_id for session in next(filter(None, victims_of), ())]
        slots_taken = len(self.running) + self.num_waiting_for_streaming_input
        if head is not None and slots_taken >= self.max_num_running_reqs and not victims:
            idle = [s for s in sessions if candidates[s.request_id].state is SessionState.IDLE]
            victims = [session.request_id for session in rank_idle_sessions(idle, 1)[:1]]
        return victims

    def _missing_blocks(self, head: Request | None) -> int:
        """Blocks that the running requests and the next waiting one need beyond those that are free."""
        blocks = self.sessions.blocks
        growth = sum(
            max(0, self._blocks_of(request) - blocks.num_blocks(request.request_id)) for request in self.running
        )
        if head is not None:
            # The engine keeps its watermark only beside running requests: alone, the head may take everything.
            watermark = blocks.num_watermark_blocks() if self.running else 0
            wanted = self._blocks_of(head) + watermark
            growth += max(0, wanted - blocks.num_blocks(head.request_id))
        missing = growth - blocks.num_free_blocks()
        # Looked up only where it may decide: a long prompt has thousands of blocks.
        return missing - self._num_shared_hits(head) if missing > 0 and head is not None else missing

    def _num_shared_hits(self, request: Request) -> int:
        """Blocks that a waiting request will find in the prefix cache, and that others hold: it takes no free ones."""
        if request.num_computed_tokens:
            return 0
        hit, *_ = self._get_local_prefix_cache_hit(request)
        return self.sessions.blocks.num_shared(hit)

    def _blocks_of(self, request: Request) -> int:
        """Blocks that hold a request's tokens; all that it may ever hold if it has a policy."""
        return blocks_for(self.compactions.bound(request.request_id) or request.num_tokens, self.block_size)

    def _park(self, record: SessionRecord) -> None:
        if record.state is SessionState.IDLE:
            self._leave_idle(record)
            self.sessions.park(record)
            record.request.status = RequestStatus.PREEMPTED
            # The workers forget it too: its next chunk reaches them as a new request.
            self.finished_req_ids.add(record.request.request_id)
        else:
            self.sessions.park(record)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:  # noqa: FBT001, FBT002 - stock signature
        """Reset the prefix cache; with ``reset_running_requests``, sessions at rest give their blocks back as well."""
        if reset_running_requests:
            for record in list(self.sessions.records.values()):
                if self._can_park(record):
                    self._guarded(record.request, partial(self._park, record))
        return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> tuple[Any, Any]:  # noqa: FBT001, FBT002 - stock signature
        freed: tuple[Any, Any] = super()._free_request(request, delay_free_blocks)
        try:
            self.sessions.close(request.request_id)
        except Exception:  # noqa: BLE001 - it has ended, and everything it held is back
            log_fault("closing.failed", request_id=request.request_id)
        return freed

    # -- failures ---------------------------------------------------------------------------------------------------

    def _end(self, request: Request, refusal: Refuse) -> None:
        """End a request or a session with an error; the others go on."""
        if request.resumable or request.request_id in self.sessions.records:
            try:
                self.sessions.fail(request.request_id, refusal)
            except Exception:  # noqa: BLE001 - it ends all the same
                log_fault("failing.failed", request_id=request.request_id)
        # The request may be a chunk's message: what lives in the queues is the session's own request.
        live = self.requests.get(request.request_id)
        if (
            live is not None
            and live.status == RequestStatus.WAITING_FOR_STREAMING_REQ
            and live not in self.skipped_waiting
        ):
            # Between two queues: the stock bookkeeping must not subtract it from the idle count again.
            live.status = RequestStatus.WAITING
        super()._end(request, refusal)

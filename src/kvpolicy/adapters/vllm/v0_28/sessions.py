"""The scheduler's half of a session: its record, and the core's decisions carried out on the engine's request."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import define, frozen

from kvpolicy.adapters.vllm.v0_28 import engine_state
from kvpolicy.adapters.vllm.v0_28.guards import sampling_errors
from kvpolicy.adapters.vllm.v0_28.wire import RETENTION_KEY, ChunkMarker, ChunkReport
from kvpolicy.core.budget import RetentionBudget, SessionLimits, admission_errors
from kvpolicy.core.errors import EngineContractError, PolicyUsageError
from kvpolicy.core.events import (
    ChunkFolded,
    ChunkRefused,
    RangeEvicted,
    SessionClosed,
    SessionConsolidated,
    SessionFailed,
    SessionOpened,
    SessionParked,
    SessionPreempted,
)
from kvpolicy.core.fold import (
    Append,
    ChunkShape,
    Consolidate,
    DropTail,
    Evict,
    FoldPlan,
    Refuse,
    consolidates_next,
    dense_refusal,
    plan_fold,
)
from kvpolicy.core.ledger import SessionLedger
from kvpolicy.core.ranking import IdleSession
from kvpolicy.core.segments import SegmentKind
from kvpolicy.core.states import SessionInput, SessionState, next_state

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, StreamingUpdate

    from kvpolicy.adapters.vllm.v0_28.engine_state import EngineBlocks
    from kvpolicy.adapters.vllm.v0_28.request_guards import RequestGuard
    from kvpolicy.core.ports import EventSink


@define(kw_only=True)
class SessionRecord:
    """One live session as the scheduler sees it. Mutable; its size is bounded by the budget."""

    request: Request
    retention: Mapping[str, Any] | None
    budget: RetentionBudget | None
    ledger: SessionLedger
    last_chunk: ChunkShape
    state: SessionState = SessionState.OPENED
    idle_since_s: float = 0.0
    discards_sample: bool = False
    evicted_since_reply: int = 0
    consolidated_since_reply: bool = False
    chunk: int = 0

    def advance(self, event: SessionInput) -> None:
        """Move the state machine on."""
        self.state = next_state(self.state, event)

    @property
    def is_idle(self) -> bool:
        """Whether a chunk that arrives now can be folded at once."""
        return self.state in {SessionState.IDLE, SessionState.PARKED}


@frozen(kw_only=True)
class SessionBook:
    """All live sessions of one scheduler. Edits requests and blocks, never a scheduler queue."""

    blocks: EngineBlocks
    limits: SessionLimits
    request_guard: RequestGuard
    max_sessions: int
    events: EventSink
    salt: Callable[[], str]
    records: dict[str, SessionRecord]

    def open(self, request: Request) -> SessionRecord:
        """Admit a session with its first chunk.

        Raises:
            PolicyUsageError: with every reason why it cannot be admitted; nothing has changed then.
        """
        record = self._admit(request)
        engine_state.make_private(request, self.salt())
        record.advance(SessionInput.CHUNK)
        self.records[request.request_id] = record
        self.events.emit(SessionOpened(request_id=request.request_id, num_tokens=record.ledger.num_tokens))
        return record

    def _admit(self, request: Request) -> SessionRecord:
        reasons = [*sampling_errors(request.sampling_params), *self.request_guard.errors(request)]
        marker = ChunkMarker.of(request.sampling_params)
        if len(self.records) >= self.max_sessions:
            reasons.append(
                f"sessions: {len(self.records)} are open and at most {self.max_sessions} may be; "
                "close one or raise --max-num-seqs"
            )
        retention = None
        budget = None
        first_chunk = len(request.prompt_token_ids or ())
        try:
            retention = retention_of(request.sampling_params)
            if retention is not None:
                budget = RetentionBudget.from_mapping(retention).resolved(self.limits, request.max_tokens)
        except PolicyUsageError as error:
            reasons += error.reasons
        if budget is not None:
            reasons += admission_errors(
                budget, self.limits, first_chunk_tokens=first_chunk, max_tokens=request.max_tokens
            )
        elif not reasons:
            refusal = dense_refusal(0, _shape_of(request), self.limits)
            reasons += [refusal.message] if refusal is not None else []
        if reasons:
            raise PolicyUsageError(reasons)
        return SessionRecord(
            request=request,
            retention=retention,
            budget=budget,
            ledger=SessionLedger.opened(first_chunk, anchor_tokens=budget.anchor_tokens if budget else None),
            last_chunk=_shape_of(request),
            chunk=marker.ordinal if marker is not None else 0,
        )

    def fold(self, record: SessionRecord, update: StreamingUpdate) -> Refuse | None:
        """Fold a chunk into an idle or parked session, or return why it is refused (nothing has changed then)."""
        marker = ChunkMarker.of(update.sampling_params)
        record.chunk = marker.ordinal if marker is not None else record.chunk + 1
        plan = self._plan(record, update)
        if plan.refusal is not None:
            self._note_refusal(record, plan.refusal)
            return plan.refusal
        for step in plan.steps:
            self._carry_out(record, step, update)
        record.last_chunk = shape = _shape_of(update)
        record.advance(SessionInput.CHUNK)
        self.events.emit(
            ChunkFolded(
                request_id=record.request.request_id,
                num_tokens=shape.num_tokens,
                num_resident_tokens=record.ledger.num_tokens,
                num_evicted_tokens=plan.num_evicted_tokens,
            )
        )
        return None

    def withdraw(self, record: SessionRecord, refusal: Refuse) -> None:
        """Take back the chunk that was folded last and has not been scheduled. What was evicted for it stays gone."""
        record.ledger = record.ledger.withdrawn()
        engine_state.drop_tail(record.request, record.ledger.num_tokens, self.limits.block_size)
        record.advance(SessionInput.STOP)
        record.idle_since_s = time.monotonic()
        if not self.blocks.num_blocks(record.request.request_id):
            record.advance(SessionInput.PARK)
        self._note_refusal(record, refusal)

    def _note_refusal(self, record: SessionRecord, refusal: Refuse) -> None:
        self.events.emit(ChunkRefused(request_id=record.request.request_id, code=refusal.code, message=refusal.message))

    def _plan(self, record: SessionRecord, update: StreamingUpdate) -> FoldPlan:
        """Return the core's plan, or a refusal where the parameters alone decide."""
        refusal = self._parameter_refusal(record, update) or self._token_refusal(update)
        if refusal is not None:
            return FoldPlan((refusal,), record.ledger)
        return plan_fold(
            record.ledger,
            _shape_of(update),
            budget=record.budget,
            limits=self.limits,
            num_computed=self._num_kept(record),
            resident=record.state is SessionState.IDLE,
        )

    def _parameter_refusal(self, record: SessionRecord, update: StreamingUpdate) -> Refuse | None:
        errors = [
            *sampling_errors(update.sampling_params),
            *self.request_guard.parameter_errors(update.sampling_params),
        ]
        try:
            retention = retention_of(update.sampling_params)
        except PolicyUsageError as error:
            errors += error.reasons
        else:
            if retention is not None and retention != record.retention:
                errors.append(
                    f"extra_args[{RETENTION_KEY!r}]: the budgets of a session are those of its first chunk "
                    f"({record.retention!r}), got {retention!r}"
                )
        grammar = update.structured_output_request and update.structured_output_request.grammar
        if isinstance(grammar, Exception):
            errors.append(grammar_error(grammar))
        return Refuse("unsupported_parameters", "\n".join(errors)) if errors else None

    def _token_refusal(self, update: StreamingUpdate) -> Refuse | None:
        errors = self.request_guard.token_errors("chunk", update.prompt_token_ids or ())
        return Refuse("unusable_chunk", "\n".join(errors)) if errors else None

    def _carry_out(self, record: SessionRecord, step: object, update: StreamingUpdate) -> None:
        request = record.request
        block_size = self.limits.block_size
        match step:
            case DropTail(keep=keep):
                engine_state.drop_tail(request, keep, block_size)
                record.ledger = record.ledger.reply_closed(keep)
            case Evict(victims=victims):
                self._evict(record, victims)
            case Consolidate():
                self._consolidate(record)
            case Append(num_tokens=num_tokens, media=media):
                engine_state.append_chunk(request, update)
                record.ledger = record.ledger.appended(num_tokens, media=media)

    def _evict(self, record: SessionRecord, victims: Any) -> None:
        request, freed = record.request, victims.freed
        num_freed = 0
        if record.state is SessionState.IDLE:
            start, end, num_freed = self.blocks.evict_token_range(request.request_id, freed.start, freed.end)
            if (start, end) != (freed.start, freed.end):
                message = f"evict_token_range: expected [{freed.start}, {freed.end}), got [{start}, {end})"
                raise EngineContractError(message)
            # Survivors behind the hole attended to what is gone: their blocks must not be found by others.
            self.blocks.withhold(request.request_id)
        engine_state.cut_range(request, freed, self.limits.block_size)
        record.ledger = record.ledger.evicted(victims, freed)
        if record.state is SessionState.PARKED:
            # Nothing is cached, so the hole leaves no gap between positions.
            record.ledger = record.ledger.preempted()
        record.evicted_since_reply += freed.width
        self.events.emit(
            RangeEvicted(request_id=request.request_id, start=freed.start, end=freed.end, num_blocks=num_freed)
        )

    def _consolidate(self, record: SessionRecord) -> None:
        self.blocks.release(record.request)
        record.ledger = record.ledger.consolidated()
        record.consolidated_since_reply = True
        self.events.emit(SessionConsolidated(request_id=record.request.request_id, num_tokens=record.ledger.num_tokens))

    def consolidate_if_due(self, record: SessionRecord) -> bool:
        """Start the idle consolidation of a session if its next chunk would need one; return whether it was started.

        The request then has to be scheduled, and the one sample that its prefill forces has to be thrown away.
        """
        if record.state is not SessionState.IDLE or record.budget is None:
            return False
        keep = self._num_kept(record)
        if not consolidates_next(
            record.ledger, record.last_chunk, budget=record.budget, limits=self.limits, num_computed=keep
        ):
            return False
        engine_state.drop_tail(record.request, keep, self.limits.block_size)
        record.ledger = record.ledger.reply_closed(keep)
        self._consolidate(record)
        record.discards_sample = True
        record.advance(SessionInput.CONSOLIDATE)
        return True

    def consolidated(self, record: SessionRecord) -> None:
        """Note that the idle consolidation is done: the window is computed and the forced sample was thrown away."""
        record.discards_sample = False
        record.advance(SessionInput.CONSOLIDATED)
        record.idle_since_s = time.monotonic()

    def park(self, record: SessionRecord) -> None:
        """Free every block of a session that is not running; its tokens stay, to be computed with its next chunk."""
        num_blocks = self.blocks.num_blocks(record.request.request_id)
        if record.state is SessionState.IDLE:
            keep = self._num_kept(record)
            engine_state.drop_tail(record.request, keep, self.limits.block_size)
            record.ledger = record.ledger.reply_closed(keep)
        self.blocks.release(record.request)
        record.discards_sample = False
        record.ledger = record.ledger.parked()
        record.advance(SessionInput.PARK)
        self.events.emit(SessionParked(request_id=record.request.request_id, num_blocks=num_blocks))

    def preempted(self, record: SessionRecord) -> None:
        """Note that the engine took a running session's blocks: it is computed again, with dense positions."""
        record.ledger = record.ledger.preempted()
        record.advance(SessionInput.PREEMPT)
        self.events.emit(SessionPreempted(request_id=record.request.request_id))

    def first_token(self, record: SessionRecord) -> None:
        """Note that the reply has begun."""
        record.advance(SessionInput.FIRST_TOKEN)

    def stopped(self, record: SessionRecord) -> ChunkReport:
        """Note that the reply has ended; return the report of its chunk."""
        record.advance(SessionInput.STOP)
        record.idle_since_s = time.monotonic()
        return self.report(record)

    def report(self, record: SessionRecord, refusal: Refuse | None = None) -> ChunkReport:
        """Return the report of the chunk that has just been answered (or refused)."""
        evicted, consolidated = 0, False
        if refusal is None:
            evicted, record.evicted_since_reply = record.evicted_since_reply, 0
            consolidated, record.consolidated_since_reply = record.consolidated_since_reply, False
        ledger = record.ledger
        return ChunkReport(
            chunk=record.chunk,
            resident_tokens=record.request.num_computed_tokens,
            num_blocks=self.blocks.num_blocks(record.request.request_id),
            evicted=evicted,
            consolidated=consolidated,
            next_position=record.request.num_computed_tokens + ledger.evicted_width,
            num_segments=len(ledger.log.segments),
            num_free_blocks=self.blocks.num_free_blocks(),
            total_evicted_tokens=ledger.num_evicted_tokens,
            num_evictions=ledger.num_evictions,
            num_consolidations=ledger.num_consolidations,
            num_parks=ledger.num_parks,
            segments=_views(ledger, record.request.num_computed_tokens),
            code=refusal.code if refusal else None,
            message=refusal.message if refusal else None,
        )

    def fail(self, request_id: str, refusal: Refuse) -> None:
        """Note that a session ends with an error, or never began; its request, if any, is freed next."""
        self.events.emit(SessionFailed(request_id=request_id, code=refusal.code, message=refusal.message))
        record = self.records.get(request_id)
        if record is not None and record.state is not SessionState.CLOSED:
            record.advance(SessionInput.FAIL)

    def close(self, request_id: str) -> None:
        """Forget a session whose request has been freed."""
        record = self.records.pop(request_id, None)
        if record is not None:
            if record.state is not SessionState.CLOSED:
                record.advance(SessionInput.CLOSE)
                record.advance(SessionInput.FREED)
            self.events.emit(SessionClosed(request_id=request_id, num_chunks=record.ledger.num_chunks))

    def rope_shift(self, record: SessionRecord) -> int:
        """Return what to add to a session's indices to get positions; 0 before its first eviction."""
        return record.ledger.positions.rope_shift

    def as_idle(self, record: SessionRecord) -> IdleSession:
        """Return the session as a candidate for parking."""
        waits = not record.is_idle
        return IdleSession(
            record.request.request_id,
            priority=record.request.priority,
            idle_s=0.0 if waits else time.monotonic() - record.idle_since_s,
            num_blocks=self.blocks.num_blocks(record.request.request_id),
        )

    def _num_kept(self, record: SessionRecord) -> int:
        """Tokens of a session that stay at its next fold: those whose KV is computed, or all of a parked one's."""
        if record.state is SessionState.PARKED:
            return record.ledger.num_tokens
        return int(record.request.num_computed_tokens)


def _views(ledger: SessionLedger, num_resident: int) -> tuple[tuple[str, int], ...]:
    """Return kind and length of every segment; what is computed beyond the ledger is the newest reply."""
    views = [(segment.kind.value, segment.width) for segment in ledger.log.segments]
    if num_resident > ledger.num_tokens:
        views.append((SegmentKind.REPLY.value, num_resident - ledger.num_tokens))
    return tuple(views)


def _shape_of(chunk: Request | StreamingUpdate) -> ChunkShape:
    return ChunkShape(
        len(chunk.prompt_token_ids or ()), chunk.max_tokens, min_tokens=max(1, chunk.sampling_params.min_tokens)
    )


def grammar_error(error: Exception) -> str:
    """Return what to say of structured outputs that passed the front end and cannot be compiled all the same."""
    return f"sampling_params.structured_outputs: it cannot be compiled: {error}"


def retention_of(params: SamplingParams | None) -> Mapping[str, Any] | None:
    """Return the retention that a chunk's sampling parameters ask for, None if none; a JSON string is read as JSON.

    Raises:
        PolicyUsageError: it is neither a mapping nor a JSON object.
    """
    value = ((params.extra_args if params is not None else None) or {}).get(RETENTION_KEY)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            reason = f"extra_args[{RETENTION_KEY!r}]: expected a mapping or a JSON object, got {value!r} ({error})"
            raise PolicyUsageError(reason) from error
    if value is not None and not isinstance(value, Mapping):
        reason = f"extra_args[{RETENTION_KEY!r}]: expected a mapping, got {type(value).__name__}"
        raise PolicyUsageError(reason)
    return value

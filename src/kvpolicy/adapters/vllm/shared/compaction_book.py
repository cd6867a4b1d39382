"""The requests that have a policy: their admission, their due events, and what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from kvpolicy.adapters.vllm.shared.messages import RETENTION_KEY, CompactionResult, RequestKey
from kvpolicy.adapters.vllm.shared.options import POLICY_KEY, EngineOptions
from kvpolicy.core.compaction import CompactionEvent, surviving_blocks
from kvpolicy.core.draws import BlockDraw
from kvpolicy.core.errors import InvariantError, PolicyUsageError
from kvpolicy.core.philox import key_of
from kvpolicy.core.policies import RequestSnapshot
from kvpolicy.core.schedule import EventSchedule
from kvpolicy.core.spaces import blocks_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

    from kvpolicy.adapters.vllm.shared.ports import BlockTables
    from kvpolicy.core.policies import KVPolicy


@define(kw_only=True)
class CompactionRecord:
    """One live request that has a policy.

    Attributes:
        bound: the most entries that it ever holds per KV head.
        next_due: logical length at which its next event is due.
        kv_shift: entries dropped so far per KV head.
        num_blocks_returned: blocks that its events gave back to the pool.
    """

    policy: KVPolicy
    request_key: str
    prompt_length: int
    schedule: EventSchedule
    bound: int
    block_size: int
    num_events: int = 0
    num_blocks_returned: int = 0
    next_due: int = field(init=False)
    kv_shift: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._count(0)

    def event(self, logical_length: int) -> CompactionEvent:
        """Return the event that is due at ``next_due``.

        Raises:
            InvariantError: the policy has none although its schedule says so, or one for another request than this.
        """
        held = logical_length - self.kv_shift
        event = self.policy.event_for(
            RequestSnapshot(
                request_key=self.request_key,
                prompt_length=self.prompt_length,
                logical_length=logical_length,
                physical_length=held,
                num_events=self.num_events,
                block_size=self.block_size,
            )
        )
        # Block table and workers go by it: an event of a policy of somebody else's must fit this very request.
        expected = (self.num_events, self.prompt_length, held, self.schedule.dropped_by(self.num_events))
        if not isinstance(event, CompactionEvent) or expected != (
            event.ordinal,
            event.prompt_length,
            event.physical_length,
            event.num_dropped,
        ):
            what = "(ordinal, prompt length, physical length, entries dropped)"
            raise InvariantError(f"policy: expected an event with {what} {expected}, got {event!r}")
        return event

    def fired(self, num_blocks_returned: int) -> None:
        """Count an event that was applied."""
        self.num_blocks_returned += num_blocks_returned
        self._count(self.num_events + 1)

    def restart(self) -> None:
        """Forget the events: the request was preempted and is replayed from its prompt."""
        self.num_blocks_returned = 0
        self._count(0)

    def _count(self, num_events: int) -> None:
        self.num_events = num_events
        self.next_due = self.schedule.due_at(num_events)
        self.kv_shift = self.schedule.dropped_before(num_events)


@frozen(kw_only=True)
class PolicyAdmission:
    """Which requests an engine takes. The front end asks first; the scheduler asks again, of every front end.

    Attributes:
        options: the engine's.
        block_size: tokens in one block.
        num_pool_blocks: blocks that requests can use; None where that is not known (yet).
        context_limit: most tokens of one request.
    """

    options: EngineOptions
    block_size: int
    num_pool_blocks: int | None
    context_limit: int

    def admit(
        self,
        extra_args: Mapping[str, Any] | None,
        *,
        prompt_length: int,
        max_tokens: int | None,
        request_key: str | None = None,
    ) -> CompactionRecord | None:
        """Return the record of a request that will be compacted; None for a dense one.

        Raises:
            PolicyUsageError: every reason why the engine cannot serve it so.
        """
        asked = (extra_args or {}).get(POLICY_KEY)
        policy = self.options.kv_cache_policy if asked is None else self.options.requested_policy(asked)
        if policy is not None and not self.options.compacts:
            reason = (
                f"{POLICY_KEY}: this engine was started without; pass {POLICY_KEY}=... when it is made ('off' will do)"
            )
            raise PolicyUsageError(reason)
        longest = min(prompt_length + (max_tokens or self.context_limit), self.context_limit)
        if policy is None:
            if self.options.compacts:
                self._require_room(longest, f"a dense request of {prompt_length} + {longest - prompt_length} tokens")
            return None
        if RETENTION_KEY in (extra_args or {}):
            reason = f"extra_args: expected {POLICY_KEY} or {RETENTION_KEY}, got both; sessions are never compacted"
            raise PolicyUsageError(reason)
        schedule = policy.schedule(prompt_length, block_size=self.block_size)
        # Behind the prompt, or a prefix-cache hit could lie beyond it and leave nothing to schedule.
        if not isinstance(schedule, EventSchedule) or schedule.first_due <= prompt_length:  # type: ignore[redundant-expr] # of others
            reason = (
                f"{POLICY_KEY}: expected a first event behind the prompt of {prompt_length} tokens, got {schedule!r}"
            )
            raise PolicyUsageError(reason)
        bound = min(schedule.peak, longest)
        self._require_room(bound, f"a request that holds up to {bound} entries")
        if request_key is None:
            reason = f"{POLICY_KEY}: the request has no key to draw by; send it through kvpolicy's LLM or AsyncLLM"
            raise PolicyUsageError(reason)
        key_of(0, request_key)
        return CompactionRecord(
            policy=policy,
            request_key=request_key,
            prompt_length=prompt_length,
            schedule=schedule,
            bound=bound,
            block_size=self.block_size,
        )

    def _require_room(self, num_entries: int, what: str) -> None:
        needed = blocks_for(num_entries, self.block_size)
        if self.num_pool_blocks is not None and needed > self.num_pool_blocks:
            reason = (
                f"request: {what} needs {needed} blocks of {self.block_size}, the pool has {self.num_pool_blocks}; "
                f"lower max_tokens, use a smaller budget, or give the engine more KV cache"
            )
            raise PolicyUsageError(reason)


def admission_of(config: VllmConfig) -> PolicyAdmission:
    """Return the admission of an engine that has been started."""
    options = EngineOptions.from_config(config)
    num_blocks = config.cache_config.num_gpu_blocks
    return PolicyAdmission(
        options=options,
        block_size=config.cache_config.block_size,
        # One of them is the null block.
        num_pool_blocks=num_blocks - 1 if num_blocks else None,
        context_limit=config.model_config.max_model_len,
    )


@frozen(kw_only=True)
class AppliedEvent:
    """An event whose blocks have left the table; ``copies`` (from, to) come before its moves."""

    event: CompactionEvent
    copies: tuple[tuple[int, int], ...]
    num_blocks_returned: int


@define(kw_only=True)
class CompactionBook:
    """All live requests that have a policy. Edits blocks, never a scheduler queue.

    Satisfies ``kv_spec.Footprints``.
    """

    admission: PolicyAdmission
    blocks: BlockTables
    records: dict[str, CompactionRecord] = field(factory=dict)

    def admit(self, request: Any) -> None:
        """Take a new request in, if it has a policy; a session never has one.

        Raises:
            PolicyUsageError: the reason why it cannot be served.
        """
        if request.resumable:
            return
        params = request.sampling_params
        extra_args = params.extra_args if params is not None else None
        record = self.admission.admit(
            extra_args,
            prompt_length=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            request_key=RequestKey.from_extra_args(extra_args),
        )
        if record is not None:
            self.records[request.request_id] = record

    def compact(self, request_id: str, logical_length: int) -> AppliedEvent:
        """Apply the event that is due to the block table.

        A block that the event writes to and that others may read is replaced by a private copy.
        """
        record = self.records[request_id]
        event = record.event(logical_length)
        surviving = surviving_blocks(event, self.block_size)
        copies: tuple[tuple[int, int], ...] = ()
        if not isinstance(event.draw, BlockDraw):
            copies = self.blocks.own_range(
                request_id, event.prompt_length // self.block_size, blocks_for(event.length_after, self.block_size)
            )
        returned = self.blocks.keep_only(request_id, surviving)
        record.fired(returned)
        return AppliedEvent(event=event, copies=copies, num_blocks_returned=returned)

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        return self.admission.block_size

    def kv_shift(self, request_id: str) -> int:
        """Return the entries dropped per KV head so far; 0 for a dense request."""
        record = self.records.get(request_id)
        return 0 if record is None else record.kv_shift

    def bound(self, request_id: str) -> int | None:
        """Return the most entries that the request will ever hold; None for a dense request."""
        record = self.records.get(request_id)
        return None if record is None else record.bound

    def prompt_length(self, request_id: str) -> int | None:
        """Return the tokens whose blocks may be published; None for a dense request."""
        record = self.records.get(request_id)
        return None if record is None else record.prompt_length

    def preempted(self, request_id: str) -> bool:
        """Forget the events of a request whose blocks are gone, to be replayed; return whether it has a policy."""
        record = self.records.get(request_id)
        if record is not None:
            record.restart()
        return record is not None

    def close(self, request_id: str, logical_length: int) -> CompactionResult | None:
        """Forget a request that has ended; return what was done to it, or None for a dense one."""
        result = self.result(request_id, logical_length)
        self.records.pop(request_id, None)
        return result

    def result(self, request_id: str, logical_length: int) -> CompactionResult | None:
        """Return what was done to a request so far; None for a dense one."""
        record = self.records.get(request_id)
        if record is None:
            return None
        return CompactionResult(
            num_events=record.num_events,
            num_dropped=record.kv_shift,
            logical_length=logical_length,
            physical_length=logical_length - record.kv_shift,
            bound=record.bound,
            num_blocks_returned=record.num_blocks_returned,
        )

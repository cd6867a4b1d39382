"""What kvpolicy adds to vLLM's own messages: extra_args (in), a step directive (to workers), a report (out).

All of them are values made of dictionaries, tuples and numbers, because they are pickled or packed between processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, field, frozen
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvpolicy.core.counts import SessionCounts

if TYPE_CHECKING:
    from kvpolicy.core.compaction import CompactionEvent

# Key under which a caller asks for retention: SamplingParams(extra_args={"streaming_retention": {...}}).
RETENTION_KEY = "streaming_retention"
# Key that is ours alone. The facade strips it from what callers send: any HTTP client can set extra_args.
INTERNAL_KEY = "kvpolicy"
# Prefix of every stop reason that kvpolicy itself gives to a chunk.
STOP_PREFIX = "kvpolicy:"
# Finish reasons that end a session; every other one ends a reply and is a chunk boundary.
TERMINAL = frozenset({FinishReason.ABORT, FinishReason.ERROR})
# Where an output carries engine-wide counters to the front end.
TOTALS_KEY = "totals"


def rehearse(request: EngineCoreRequest) -> None:
    """Raise what sending a request would raise at either end.

    At the engine's, where its values are decoded into their types, that would end the thread which reads for everybody.
    """
    MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))


@frozen
class ChunkMarker:
    """Place of one message in its session.

    ``ordinal`` counts the chunks of the stream, those that the front end refused included; ``first``: the engine has
    not heard of the session before; ``final``: the end of input.
    """

    ordinal: int
    first: bool
    final: bool = False

    def to_extra_args(self, extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a copy of ``extra_args`` that carries this marker instead of any other."""
        return {**(extra_args or {}), INTERNAL_KEY: asdict(self)}

    @classmethod
    def of(cls, params: Any) -> ChunkMarker | None:
        """Return the marker in sampling parameters, or None where the message came through a stock front end."""
        match (getattr(params, "extra_args", None) or {}).get(INTERNAL_KEY):
            case {"ordinal": int(ordinal), "first": bool(first), "final": bool(final)}:
                return cls(ordinal, first=first, final=final)
        return None


@frozen
class RequestKey:
    """The caller's name for a request, by which a policy draws: the engine renames every request at random."""

    key: str

    def to_extra_args(self, extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a copy of ``extra_args`` that carries this key instead of any other."""
        return {**(extra_args or {}), INTERNAL_KEY: {"request_key": self.key}}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> str | None:
        """Return the key, or None where the message came through a stock front end."""
        match (extra_args or {}).get(INTERNAL_KEY):
            case {"request_key": str(key)}:
                return key
        return None


@frozen(kw_only=True)
class Compaction:
    """An event to carry out on one request before the step computes anything.

    ``copies`` are blocks (from, to) to be copied as a whole before the event's own moves.
    """

    request_id: str
    event: CompactionEvent
    copies: tuple[tuple[int, int], ...] = ()


@frozen(kw_only=True)
class StepDirective:
    """What the workers must know about one step, by request id (0 is left out).

    Attributes:
        rope_shifts: positions to add.
        kv_shifts: entries dropped so far per KV head, this step's events included.
        compactions: this step's events, also of requests that the step does not compute.
    """

    rope_shifts: Mapping[str, int] = field(factory=dict)
    kv_shifts: Mapping[str, int] = field(factory=dict)
    compactions: tuple[Compaction, ...] = ()

    @classmethod
    def of(cls, scheduler_output: Any) -> StepDirective:
        """Return the directive of a step; an empty one for a step that no scheduler of ours has made (a dummy)."""
        return getattr(scheduler_output, INTERNAL_KEY, None) or cls()


@frozen(kw_only=True)
class CompactionWork:
    """What a worker did for the events since its last report; times in seconds, of this one worker."""

    num_moved: int = 0
    expand_s: float = 0.0
    relocate_s: float = 0.0

    def plus(self, other: CompactionWork) -> CompactionWork:
        """Return the sum."""
        return CompactionWork(
            num_moved=self.num_moved + other.num_moved,
            expand_s=self.expand_s + other.expand_s,
            relocate_s=self.relocate_s + other.relocate_s,
        )


@frozen(kw_only=True)
class CompactionTotals:
    """Engine-wide counters since the engine was started. Entries are counted per KV head and layer."""

    num_events: int = 0
    num_dropped: int = 0
    num_blocks_returned: int = 0
    num_preemptions: int = 0
    num_moved: int = 0
    expand_s: float = 0.0
    relocate_s: float = 0.0

    @classmethod
    def from_wire(cls, params: Mapping[str, Any]) -> CompactionTotals | None:
        """Take the totals out of an output's dictionary; None if it carries none."""
        value = params.get(INTERNAL_KEY)
        totals = value.pop(TOTALS_KEY, None) if isinstance(value, dict) else None
        return None if totals is None else cls(**totals)

    def with_event(self, num_dropped: int, num_blocks_returned: int) -> CompactionTotals:
        """Return the totals with one more event."""
        return evolve(
            self,
            num_events=self.num_events + 1,
            num_dropped=self.num_dropped + num_dropped,
            num_blocks_returned=self.num_blocks_returned + num_blocks_returned,
        )

    def with_work(self, work: CompactionWork) -> CompactionTotals:
        """Return the totals with what the workers did in one step."""
        return evolve(
            self,
            num_moved=self.num_moved + work.num_moved,
            expand_s=self.expand_s + work.expand_s,
            relocate_s=self.relocate_s + work.relocate_s,
        )

    def with_preemption(self) -> CompactionTotals:
        """Return the totals with one more preemption of a request that has a policy."""
        return evolve(self, num_preemptions=self.num_preemptions + 1)


@frozen(kw_only=True)
class CompactionResult:
    """What a policy did to one request: entries are per KV head.

    Attributes:
        num_events: events applied (a replay after a preemption counts from the start).
        num_dropped: entries dropped.
        logical_length: entries ever stored.
        physical_length: entries held at the end.
        bound: the most entries that could ever be held.
        num_blocks_returned: blocks that events gave back to the pool.
    """

    num_events: int
    num_dropped: int
    logical_length: int
    physical_length: int
    bound: int
    num_blocks_returned: int

    def to_wire(self, totals: CompactionTotals) -> dict[str, Any]:
        """Return the dictionary that rides on a request's last output; the front end takes the totals out of it."""
        return {INTERNAL_KEY: {**asdict(self), TOTALS_KEY: asdict(totals)}}


@frozen(kw_only=True)
class ChunkReport:
    """What the scheduler says about one chunk when its reply has ended (or the chunk was refused).

    Token and block counts are those of the session at that moment; ``counts`` are those of its life, ``since_reply``
    those since the reply before (a refusal tells of none); ``segments`` are the kind and length of each, oldest first,
    with the tokens of the newest reply last; ``code`` and ``message`` are set on refusal or failure.
    """

    chunk: int = 0
    resident_tokens: int = 0
    num_blocks: int = 0
    counts: SessionCounts = field(factory=SessionCounts)
    since_reply: SessionCounts = field(factory=SessionCounts)
    next_position: int = 0
    num_segments: int = 0
    num_free_blocks: int = 0
    segments: tuple[tuple[str, int], ...] = ()
    code: str | None = None
    message: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return the dictionary that rides on the output message."""
        return {INTERNAL_KEY: asdict(self)}

    @classmethod
    def from_wire(cls, params: Mapping[str, Any] | None) -> ChunkReport | None:
        """Return the report of an output message, or None if it carries none."""
        value = (params or {}).get(INTERNAL_KEY)
        if not isinstance(value, Mapping) or TOTALS_KEY in value:
            return None
        counts = {name: SessionCounts(**value[name]) for name in ("counts", "since_reply") if name in value}
        return cls(**{**value, **counts})

"""Policies of compaction: from what a request holds to the event that is due, if one is.

A policy is a value and its methods are pure. What is random in an event comes from its key (the policy's seed
and the request's key), so a request gets the same events whatever runs beside it, and again when it is
replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, Self, runtime_checkable

from attrs import Factory, frozen

from kvpolicy.core.checks import from_mapping, instance_errors, integer_errors, reject
from kvpolicy.core.compaction import CompactionEvent
from kvpolicy.core.draws import BlockDraw, Draw, RingDraw, UniformDraw
from kvpolicy.core.errors import InvariantError, PolicyUsageError
from kvpolicy.core.philox import key_of, seed_errors
from kvpolicy.core.schedule import EventSchedule, block_schedule, token_schedule

# Requirement R.31.
_DEFAULT_BUDGET = 2048
_DEFAULT_BUFFER_SIZE = 64

OFF = "off"
"""In place of a policy's name: no policy."""

_GRANULARITIES = ("head", "shared", "block")


@frozen(kw_only=True)
class RequestSnapshot:
    """What a policy may know about a request: its entries per KV head when a step is scheduled.

    Attributes:
        request_key: the caller's name for the request, the same whenever it is repeated.
        prompt_length: entries of the prompt.
        logical_length: entries stored so far, those dropped since included.
        physical_length: entries held.
        block_size: of the request's block table, in entries.
        num_events: events applied so far.
    """

    request_key: str
    prompt_length: int
    logical_length: int
    physical_length: int
    block_size: int
    num_events: int = 0

    def __attrs_post_init__(self) -> None:
        reject(instance_errors("snapshot.request_key", self.request_key, str))
        reject(
            integer_errors("snapshot.prompt_length", self.prompt_length, 1)
            + integer_errors("snapshot.physical_length", self.physical_length, 0)
            + integer_errors("snapshot.block_size", self.block_size, 1)
            + integer_errors("snapshot.num_events", self.num_events, 0)
        )
        reject(
            integer_errors(
                "snapshot.logical_length", self.logical_length, self.physical_length, because="physical_length"
            )
        )


@runtime_checkable
class KVPolicy(Protocol):
    """Decides when a request is compacted, and how what goes is drawn. Both methods are pure.

    ``kvpolicy.testing.check_policy`` tests whether a policy keeps to what is promised here.
    """

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        """Return when a request with this prompt is compacted, and with that the most it ever holds.

        ``block_size`` is the engine's, in entries; a policy that drops single entries has no use for it.

        Raises:
            PolicyUsageError: a request with this prompt cannot be served.
        """
        ...

    def event_for(self, snapshot: RequestSnapshot) -> CompactionEvent | None:
        """Return the event to apply before the next token is written; None if none is due."""
        ...


@frozen(kw_only=True)
class _BudgetedPolicy:
    """A policy with a budget K and a buffer r, whose events drop single entries."""

    budget: int = _DEFAULT_BUDGET
    buffer_size: int = _DEFAULT_BUFFER_SIZE

    def __attrs_post_init__(self) -> None:
        reject(self._errors())

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Return the policy that a mapping (a JSON object, say) describes; what is left out has its default.

        Raises:
            PolicyUsageError: unknown keys, wrong types and impossible values, all at once.
        """
        return from_mapping(cls, mapping, name="policy options")

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:  # noqa: ARG002 - the port's
        """Return when a request with this prompt is compacted, whatever the block size.

        Raises:
            PolicyUsageError: the prompt is longer than the budget.
        """
        return token_schedule(budget=self.budget, buffer_size=self.buffer_size, prompt_length=prompt_length)

    def _errors(self) -> tuple[str, ...]:
        return integer_errors("budget", self.budget, 1) + integer_errors("buffer_size", self.buffer_size, 0)


@frozen(kw_only=True)
class RandKV(_BudgetedPolicy):
    """Keeps the whole prompt, the newest r entries and a random sample of the others.

    Each event drops uniformly among the candidates, so older entries have survived more draws: of those that
    were candidates of n events in steady state (r go), a share of ((K - prompt) / (K + r - prompt))^n is left.

    Attributes:
        budget: K, entries kept per KV head beyond the buffer, the prompt included.
        buffer_size: r, the newest entries that are never dropped, and the event interval.
        seed: 64 bits.
        granularity: "head": a draw of its own in every layer and KV head; "shared": one for all; "block": one for
            all, of whole blocks of generated entries (fewer events, nothing is moved).

    With "head" and "shared", K + r entries stay and at most K + max(2r, 1) are held; with "block", at least K + r
    and at most K + r + 2 x block size - 1.
    """

    seed: int = 0
    granularity: str = "head"

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        """Return when a request with this prompt is compacted.

        >>> RandKV(budget=9, buffer_size=4, granularity="block").schedule(5, block_size=4).peak
        17

        Raises:
            PolicyUsageError: the prompt is longer than the budget.
        """
        if self.granularity != "block":
            return super().schedule(prompt_length, block_size=block_size)
        return block_schedule(
            budget=self.budget, buffer_size=self.buffer_size, prompt_length=prompt_length, block_size=block_size
        )

    def event_for(self, snapshot: RequestSnapshot) -> CompactionEvent | None:
        """Return the event that is due; None if none is.

        With budget 8 and buffer 4, at 13 entries:

        >>> policy = RandKV(budget=8, buffer_size=4)
        >>> event = policy.event_for(
        ...     RequestSnapshot(
        ...         request_key="a", prompt_length=5, logical_length=13, physical_length=13, block_size=16
        ...     )
        ... )
        >>> event.ordinal, event.num_dropped, event.candidates
        (0, 1, TokenRange(start=5, end=9))

        Raises:
            PolicyUsageError: the prompt is longer than the budget.
            InvariantError: the request was not compacted as its schedule says.
        """
        is_shared = self.granularity == "shared"
        draw = BlockDraw(snapshot.block_size) if self.granularity == "block" else UniformDraw(is_shared=is_shared)
        schedule = self.schedule(snapshot.prompt_length, block_size=snapshot.block_size)
        return due_event(schedule, snapshot, draw=draw, num_protected=self.buffer_size, seed=self.seed)

    def _errors(self) -> tuple[str, ...]:
        reasons = super()._errors() + seed_errors(self.seed)
        if self.granularity in _GRANULARITIES:
            return reasons
        return (*reasons, f"granularity: expected one of {', '.join(_GRANULARITIES)}, got {self.granularity!r}")


@frozen(kw_only=True)
class SinkWindow(_BudgetedPolicy):
    """Keeps the whole prompt, as sinks, and the newest generated entries: K + r - prompt after an event.

    After StreamingLLM (Xiao et al., 2024, section 3.2), with these deviations: the sinks are the whole prompt
    and not its first four tokens, entries keep their positions, and the window is cut every r entries.

    Attributes:
        budget: K, entries kept per KV head beyond the buffer, the prompt included.
        buffer_size: r, the event interval.
    """

    def event_for(self, snapshot: RequestSnapshot) -> CompactionEvent | None:
        """Return the event that is due; None if none is.

        The generated entries that stay are a ring, and each event goes on where the last one ended. Budget 8,
        buffer 4, prompt 5: a ring of 7, and starts of 0, 1 (event 0 dropped one), 5, 2 (9 modulo 7).

        Raises:
            PolicyUsageError: the prompt is longer than the budget.
            InvariantError: the request was not compacted as its schedule says.
        """
        schedule = self.schedule(snapshot.prompt_length, block_size=snapshot.block_size)
        # With prompt = K and r = 0 no generated entry stays: a ring of none, and the one candidate goes.
        ring = max(schedule.settled - snapshot.prompt_length, 1)
        start = schedule.dropped_before(snapshot.num_events) % ring
        return due_event(schedule, snapshot, draw=RingDraw(start), num_protected=self.buffer_size)


def due_event(
    schedule: EventSchedule, snapshot: RequestSnapshot, *, draw: Draw, num_protected: int, seed: int = 0
) -> CompactionEvent | None:
    """Return the event that a schedule has for a request now; None if it has none. For writers of policies.

    Raises:
        InvariantError: the request was not compacted as the schedule says: an event was left out or applied
            twice, or a wrong number of entries is held. Catching up would break the promise about the newest
            entries.
    """
    ordinal, length = snapshot.num_events, snapshot.logical_length
    num_due = schedule.events_due_by(length)
    expected = length - schedule.dropped_before(ordinal)
    is_due = num_due > ordinal and schedule.due_at(ordinal) == length
    if not is_due and num_due != ordinal:
        raise InvariantError(f"snapshot.num_events: expected {num_due} at logical length {length}, got {ordinal}")
    if snapshot.physical_length != expected:
        raise InvariantError(
            f"snapshot.physical_length: expected {expected} at logical length {length} after {ordinal} events, "
            f"got {snapshot.physical_length}"
        )
    if not is_due:
        return None
    return CompactionEvent(
        key=key_of(seed, snapshot.request_key),
        ordinal=ordinal,
        prompt_length=snapshot.prompt_length,
        physical_length=snapshot.physical_length,
        num_dropped=schedule.dropped_by(ordinal),
        num_protected=num_protected,
        draw=draw,
    )


PolicyFactory = Callable[[Mapping[str, Any]], KVPolicy]
"""Makes a policy from its options."""


@frozen
class PolicyRegistry:
    """The policies that exist, by name. Immutable: registering returns another registry.

    >>> registry = built_in_policies().register("window", SinkWindow.from_mapping)
    >>> registry.names
    ('randkv', 'sink_window', 'window')
    >>> registry.create("randkv", {"budget": 256})
    RandKV(budget=256, buffer_size=64, seed=0, granularity='head')
    """

    _factories: Mapping[str, PolicyFactory] = Factory(lambda: MappingProxyType({}))

    @property
    def names(self) -> tuple[str, ...]:
        """The known names, sorted."""
        return tuple(sorted(self._factories))

    def register(self, name: str, factory: PolicyFactory) -> PolicyRegistry:
        """Return a registry that knows one more policy.

        Raises:
            PolicyUsageError: the name is taken, or means something else where policies are named (``OFF``, and
                whatever has a colon in it).
        """
        if name == OFF or ":" in name:
            raise PolicyUsageError(f"policy: expected a name without a colon and other than {OFF!r}, got {name!r}")
        if name in self._factories:
            raise PolicyUsageError(f"policy {name!r}: already registered; known policies: {', '.join(self.names)}")
        return PolicyRegistry(MappingProxyType({**self._factories, name: factory}))

    def create(self, name: str, options: Mapping[str, Any] = MappingProxyType({})) -> KVPolicy:
        """Return the policy of this name with these options.

        Raises:
            PolicyUsageError: the name is unknown, or the policy rejects the options.
        """
        # In the tuple, since a name from a configuration need not be hashable.
        if name not in self.names:
            known = ", ".join(self.names) or "none"
            raise PolicyUsageError(f"policy: unknown name {name!r}; known policies: {known}")
        return self._factories[name](options)


def built_in_policies() -> PolicyRegistry:
    """Return a registry of the policies that kvpolicy has."""
    return PolicyRegistry().register("randkv", RandKV.from_mapping).register("sink_window", SinkWindow.from_mapping)

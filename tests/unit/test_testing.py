"""The conformance suite: it passes what keeps the rules, and names the rule that a policy breaks."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define, evolve, field, frozen

from kvpolicy import EventSchedule, PolicyUsageError, RandKV, SinkWindow
from kvpolicy.core.draws import BlockDraw, UniformDraw
from kvpolicy.core.philox import key_of
from kvpolicy.testing import RULES, PolicyConformanceError, check_policy

if TYPE_CHECKING:
    from kvpolicy import CompactionEvent, RequestSnapshot


@pytest.mark.parametrize(
    "policy",
    [
        *(
            RandKV(budget=budget, buffer_size=buffer_size, granularity=granularity)
            for budget, buffer_size in [(1, 0), (8, 0), (16, 1), (17, 3), (40, 64)]
            for granularity in ("head", "shared", "block")
        ),
        SinkWindow(budget=1, buffer_size=0),
        SinkWindow(budget=16, buffer_size=16),
        SinkWindow(budget=100, buffer_size=7),
    ],
)
def test_the_policies_of_kvpolicy_keep_the_rules(policy: RandKV | SinkWindow) -> None:
    check_policy(policy)


def test_so_do_their_defaults() -> None:
    check_policy(RandKV(), prompt_lengths=[100], block_sizes=[16], num_events=3)
    check_policy(SinkWindow(), prompt_lengths=[100], block_sizes=[16], num_events=3)


@frozen(kw_only=True)
class Base(RandKV):
    """RandKV with small budgets; each class below breaks a rule in one place."""

    budget: int = 20
    buffer_size: int = 4

    def event_for(self, snapshot: RequestSnapshot) -> CompactionEvent | None:
        event = super().event_for(snapshot)
        return None if event is None else self.spoilt(event, snapshot)

    def spoilt(self, event: CompactionEvent, snapshot: RequestSnapshot) -> CompactionEvent | None:
        assert snapshot.prompt_length == event.prompt_length
        return event


class SpareEveryThird(Base):
    """It leaves out every third event."""

    def spoilt(self, event: CompactionEvent, snapshot: RequestSnapshot) -> CompactionEvent | None:
        return None if snapshot.num_events % 3 == 2 else event


class Early(Base):
    """Its events come one entry before the schedule says so."""

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        schedule = super().schedule(prompt_length, block_size=block_size)
        return evolve(schedule, first_due=schedule.first_due + 1)

    def event_for(self, snapshot: RequestSnapshot) -> CompactionEvent | None:
        twin = RandKV(budget=self.budget, buffer_size=self.buffer_size)
        return twin.event_for(snapshot)


class TooFew(Base):
    """It drops one entry less than it promised."""

    def spoilt(self, event: CompactionEvent, snapshot: RequestSnapshot) -> CompactionEvent | None:
        del snapshot
        return evolve(event, num_dropped=max(event.num_dropped - 1, 1))


@frozen(kw_only=True)
class Hoarder(Base):
    """It drops half of what it promised and never complains."""

    def event_for(self, snapshot: RequestSnapshot) -> CompactionEvent | None:
        schedule = self.schedule(snapshot.prompt_length, block_size=snapshot.block_size)
        ordinal = snapshot.num_events
        if schedule.due_at(ordinal) != snapshot.logical_length:
            return None
        exact = evolve(snapshot, physical_length=schedule.length_before(ordinal))
        event = RandKV(budget=self.budget, buffer_size=self.buffer_size, seed=self.seed).event_for(exact)
        assert event is not None
        dropped = max(event.num_dropped // 2, 1)
        return evolve(event, physical_length=snapshot.physical_length, num_dropped=dropped)


class NoRespect(Base):
    """It takes the prompt for a sink of one."""

    def spoilt(self, event: CompactionEvent, snapshot: RequestSnapshot) -> CompactionEvent | None:
        del snapshot
        return evolve(event, prompt_length=1)


class TooProtective(Base):
    """It protects more than comes between two events."""

    def spoilt(self, event: CompactionEvent, snapshot: RequestSnapshot) -> CompactionEvent | None:
        del snapshot
        protected = event.physical_length - event.prompt_length - event.num_dropped
        return evolve(event, num_protected=protected)


class WrongBlocks(Base):
    """Its blocks have a size of their own."""

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        del block_size
        return super().schedule(prompt_length, block_size=4)

    def spoilt(self, event: CompactionEvent, snapshot: RequestSnapshot) -> CompactionEvent | None:
        del snapshot
        return evolve(event, draw=BlockDraw(4))


class OwnDraw(Base):
    """It slips a draw of its own past the event's checks."""

    def spoilt(self, event: CompactionEvent, snapshot: RequestSnapshot) -> CompactionEvent | None:
        del snapshot
        object.__setattr__(event, "draw", "mine")
        return event


class Impossible(Base):
    """It slips a number past the event's checks that leaves too few sources for the holes."""

    def spoilt(self, event: CompactionEvent, snapshot: RequestSnapshot) -> CompactionEvent | None:
        del snapshot
        object.__setattr__(event, "num_dropped", event.candidates.width + 2)
        return event


class OneKey(Base):
    """All requests share a key."""

    def spoilt(self, event: CompactionEvent, snapshot: RequestSnapshot) -> CompactionEvent | None:
        del snapshot
        return evolve(event, key=key_of(self.seed, "everybody"))


class KeyPerEvent(Base):
    """Each event has a key of its own."""

    def spoilt(self, event: CompactionEvent, snapshot: RequestSnapshot) -> CompactionEvent | None:
        return evolve(event, key=key_of(self.seed, f"{snapshot.request_key}/{event.ordinal}"))


class NoSeed(Base):
    """The seed changes nothing."""

    def spoilt(self, event: CompactionEvent, snapshot: RequestSnapshot) -> CompactionEvent | None:
        return evolve(event, key=key_of(0, snapshot.request_key))


class WrongError(Base):
    """It refuses a prompt with an error of the wrong kind."""

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        if prompt_length > self.budget:
            raise KeyError(prompt_length)
        return super().schedule(prompt_length, block_size=block_size)


class RefusesAll(Base):
    """It takes no prompt."""

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        raise PolicyUsageError(f"no: {prompt_length}, {block_size}")


class NoSchedule(Base):
    """Its schedule is a number."""

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        del prompt_length, block_size
        result: Any = 13
        return result  # type: ignore[no-any-return]  # what it is for


class AtOnce(Base):
    """An event is due before a prompt of more than 12 has been stored."""

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        del prompt_length, block_size
        return EventSchedule(first_due=12, interval=4, first_dropped=4)


_calls = [0]


class Counting(Base):
    """It remembers, where no field shows it."""

    def spoilt(self, event: CompactionEvent, snapshot: RequestSnapshot) -> CompactionEvent | None:
        del snapshot
        _calls[0] += 1
        return evolve(event, draw=UniformDraw(is_shared=_calls[0] % 2 == 0))


class CountingSchedule(Base):
    """So does this one, in its schedule."""

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        _calls[0] += 1
        schedule = super().schedule(prompt_length, block_size=block_size)
        return evolve(schedule, first_due=schedule.first_due + _calls[0] % 2)


@frozen(kw_only=True)
class HoldsAFunction(Base):
    """It cannot be pickled."""

    name_of: Any = field(factory=lambda: lambda key: key)


@frozen(kw_only=True)
class HoldsAList(Base):
    """It has no hash."""

    names: list[str] = field(factory=list)


@define(kw_only=True)
class Mutable:
    """It can be changed, and has no hash."""

    budget: int = 20

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        return RandKV(budget=self.budget, buffer_size=4).schedule(prompt_length, block_size=block_size)

    def event_for(self, snapshot: RequestSnapshot) -> CompactionEvent | None:
        return RandKV(budget=self.budget, buffer_size=4).event_for(snapshot)


class Identity:
    """An object and not a value; anybody may set its budget."""

    __slots__ = "budget"  # noqa: PLC0205 - a text is one slot

    def __init__(self) -> None:
        self.budget = 20

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        return RandKV(budget=self.budget, buffer_size=4).schedule(prompt_length, block_size=block_size)

    def event_for(self, snapshot: RequestSnapshot) -> CompactionEvent | None:
        return RandKV(budget=self.budget, buffer_size=4).event_for(snapshot)


BROKEN: list[tuple[Any, dict[str, str]]] = [
    (SpareEveryThird(), {"due": "expected event 2, got None"}),
    (Early(), {"due": "expected None, got CompactionEvent"}),
    (TooFew(), {"agreement": "event.num_dropped: expected 4, got 3"}),
    (
        Hoarder(),
        {"agreement": "event.num_dropped: expected 4, got 2", "peak": "expected at most 28 entries, got 2"},
    ),
    (NoRespect(), {"agreement": "event.prompt_length: expected 2, got 1", "prompt": "drops prompt entries"}),
    (TooProtective(), {"newest": "num_protected is at most the schedule's interval"}),
    (WrongBlocks(granularity="block"), {"draw": "block_size: expected 1, got 4"}),
    (OwnDraw(), {"draw": "expected one of UniformDraw, RingDraw, BlockDraw, got 'mine'"}),
    (Impossible(), {"expand": "Error: ", "agreement": "event.num_dropped: expected 1, got "}),
    (OneKey(), {"key": "expected another key than that of request 'a'"}),
    (KeyPerEvent(), {"key": "expected one key for all events"}),
    (NoSeed(seed=6), {"key": "expected the seed 7 to give another key than 6"}),
    (WrongError(), {"serves": "from schedule, got KeyError: 100"}),
    (RefusesAll(), {"serves": "expected to take a prompt below 8192 entries, got none"}),
    (NoSchedule(), {"schedule": "expected an EventSchedule, got 13"}),
    (AtOnce(), {"schedule": "first_due: expected more than the prompt, got 12"}),
    (Counting(), {"pure": "again from the policy"}),
    (CountingSchedule(), {"pure": "schedule: expected EventSchedule"}),
    (HoldsAFunction(), {"picklable": "lambda"}),
    (HoldsAList(), {"immutable": "unhashable type"}),
    (Mutable(), {"immutable": "unhashable type: 'Mutable'"}),
    (Identity(), {"picklable": "expected a copy that is equal to", "immutable": "when 'budget' is set, got none"}),
    (Base(budget=100_000), {"progress": "expected an event within 8192 entries, got none"}),
    (object(), {"serves": "AttributeError: 'object' object has no attribute 'schedule'"}),
]


@pytest.mark.parametrize(
    ("policy", "messages"),
    BROKEN,
    ids=lambda value: type(value).__name__,
)
def test_a_broken_rule_is_named(policy: Any, messages: dict[str, str]) -> None:
    with pytest.raises(PolicyConformanceError) as caught:
        check_policy(policy)
    for rule, text in messages.items():
        assert any(line.startswith(f"{rule} (") and text in line for line in caught.value.broken), str(caught.value)
    assert {line.split(" ", 1)[0] for line in caught.value.broken} <= set(RULES)


def test_every_broken_rule_is_reported_at_once_with_its_meaning_and_first_place() -> None:
    with pytest.raises(PolicyConformanceError) as caught:
        check_policy(Hoarder())
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("breaks 2 of the rules for policies:")
    assert lines[1].startswith(
        "  agreement (an event has the ordinal and the lengths of the snapshot, and drops what its schedule says): "
        "prompt 1, block size 1, request 'a', logical length 29: event.num_dropped: expected 4, got 2 (and "
    )
    assert lines[2].startswith("  peak (")
    assert isinstance(caught.value, AssertionError)
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - as a test runner with workers does
    assert str(again) == str(caught.value)


def test_the_base_of_the_broken_ones_is_sound() -> None:
    check_policy(Base())
    check_policy(Base(granularity="block"))


def test_the_kinds_of_request_and_engine_can_be_chosen() -> None:
    check_policy(Base(), prompt_lengths=[3], block_sizes=[7], request_keys=["x", "y", "z"], num_events=2, max_length=64)
    with pytest.raises(PolicyUsageError, match=r"request_keys: expected at least two different ones, got \('a', 'a'\)"):
        check_policy(Base(), request_keys=["a", "a"])


def test_no_rule_is_without_a_broken_policy() -> None:
    assert {rule for _, messages in BROKEN for rule in messages} == set(RULES)

"""One request, driven as an engine drives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import Factory, define

from kvpolicy.core.compaction import CompactionEvent, expand, retained_positions, surviving_blocks
from kvpolicy.core.draws import BlockDraw, draw_errors
from kvpolicy.core.policies import KVPolicy, RequestSnapshot
from kvpolicy.core.schedule import EventSchedule
from kvpolicy.core.spaces import LogicalPosition
from kvpolicy.testing.calls import Failure, ask, schedule_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpolicy.testing.findings import Findings

_HEADS = ((0, 0), (3, 1))
# Lengths between two events at which a policy is asked: so many at either end of the gap, and in between.
_NUM_ASKED = 16


@define
class Generation:
    """One request: it is driven, and every answer is checked against the schedule and kept."""

    policy: KVPolicy
    findings: Findings
    prompt_length: int
    block_size: int
    request_key: str
    answers: list[tuple[RequestSnapshot, Any]] = Factory(list)
    events: list[CompactionEvent] = Factory(list)
    is_broken: bool = False
    _held: list[tuple[LogicalPosition, ...]] = Factory(list)
    _logical: int = 0

    @property
    def where(self) -> str:
        """The place, for messages."""
        return (
            f"prompt {self.prompt_length}, block size {self.block_size}, request {self.request_key!r}, "
            f"logical length {self._logical}"
        )

    def add(self, rule: str, detail: str) -> None:
        """Note a broken rule."""
        self.is_broken = True
        self.findings.add(rule, f"{self.where}: {detail}")

    def run(self, num_events: int, max_length: int) -> None:
        """Drive the request through its events; what comes after an answer that makes no sense is not looked at."""
        self._held = [()] * len(_HEADS)
        self._append_to(self.prompt_length)
        schedule = self._checked_schedule()
        while schedule is not None and len(self.events) < num_events:
            due = schedule.due_at(len(self.events))
            for length in _lengths(self._logical, min(due, max_length)):
                self._append_to(length)
                if len(self._held[0]) > schedule.peak:
                    self.add("peak", f"expected at most {schedule.peak} entries, got {len(self._held[0])}")
                    return
                if not self._step(schedule, is_due=length == due):
                    return
            if due > max_length:
                return

    def _append_to(self, length: int) -> None:
        new = tuple(LogicalPosition(position) for position in range(self._logical, length))
        self._held = [held + new for held in self._held]
        self._logical = length

    def _checked_schedule(self) -> EventSchedule | None:
        schedule = schedule_of(self.policy, self.prompt_length, self.block_size)
        if not isinstance(schedule, EventSchedule):
            self.add("schedule", f"expected an EventSchedule, got {schedule!r}")
            return None
        if schedule.first_due <= self.prompt_length:
            self.add("schedule", f"first_due: expected more than the prompt, got {schedule.first_due}")
            return None
        for _ in range(2):
            if (again := schedule_of(self.policy, self.prompt_length, self.block_size)) != schedule:
                self.add("pure", f"schedule: expected {schedule!r} again, got {again!r}")
                return None
        return schedule

    def _snapshot(self) -> RequestSnapshot:
        return RequestSnapshot(
            request_key=self.request_key,
            prompt_length=self.prompt_length,
            logical_length=self._logical,
            physical_length=len(self._held[0]),
            block_size=self.block_size,
            num_events=len(self.events),
        )

    def _answer(self) -> Any:  # noqa: ANN401 - whatever a policy returns
        snapshot = self._snapshot()
        self.answers.append((snapshot, ask(self.policy, snapshot)))
        return self.answers[-1][1]

    def _step(self, schedule: EventSchedule, *, is_due: bool) -> bool:
        """Ask, check, apply; return whether the generation can go on."""
        event = self._answer()
        # An engine goes on after a wrong event, so this does, too: until the policy has had enough of it.
        if self.is_broken and isinstance(event, Failure):
            return False
        if not is_due:
            if event is not None:
                self.add("due", f"expected None, got {event!r}")
            return event is None
        if not isinstance(event, CompactionEvent):
            self.add("due", f"expected event {len(self.events)}, got {event!r}")
            return False
        if not self._check_event(event, schedule):
            return False
        self._apply(event)
        return True

    def _check_event(self, event: CompactionEvent, schedule: EventSchedule) -> bool:
        """Check an event by itself; return whether it can be applied."""
        ordinal = len(self.events)
        agreed = {
            "ordinal": ordinal,
            "prompt_length": self.prompt_length,
            "physical_length": len(self._held[0]),
            "num_dropped": schedule.dropped_by(ordinal),
        }
        for name, expected in agreed.items():
            if (found := getattr(event, name)) != expected:
                self.add("agreement", f"event.{name}: expected {expected}, got {found}")
        if reasons := draw_errors(event.draw):
            self.add("draw", reasons[0])
            return False
        if isinstance(event.draw, BlockDraw) and event.draw.block_size != self.block_size:
            self.add("draw", f"block_size: expected {self.block_size}, got {event.draw.block_size}")
        return event.physical_length == len(self._held[0])

    def _apply(self, event: CompactionEvent) -> None:
        """Drop what the event drops, in every head."""
        self._check_newest_are_last(event)
        self._held = [self._retained(event, head, held) for head, held in zip(_HEADS, self._held, strict=True)]
        self.events.append(event)

    def _check_newest_are_last(self, event: CompactionEvent) -> None:
        newest = range(self._logical - event.num_protected, self._logical)
        if any(held[len(held) - event.num_protected :] != tuple(newest) for held in self._held):
            self.add(
                "newest",
                f"expected the positions {newest.start} to {newest.stop - 1} in the last cells: an event moves others "
                "there, so num_protected is at most the schedule's interval",
            )

    def _retained(
        self, event: CompactionEvent, head: tuple[int, int], held: tuple[LogicalPosition, ...]
    ) -> tuple[LogicalPosition, ...]:
        try:
            plan = expand(event, *head)
            after = retained_positions(event, plan, held)
            if isinstance(event.draw, BlockDraw):
                surviving_blocks(event, event.draw.block_size)
        except Exception as error:  # noqa: BLE001 - whatever an impossible event leads to
            self.add("expand", f"{event!r}: {type(error).__name__}: {error}")
            return held[: event.length_after]
        if len(set(plan.dropped)) != event.num_dropped or len(set(after)) != event.length_after:
            self.add("expand", f"{event!r}: expected {event.num_dropped} entries to go, got {len(set(plan.dropped))}")
        if after[: self.prompt_length] != held[: self.prompt_length]:
            self.add("prompt", f"{event!r} drops prompt entries")
        if not set(after) >= set(range(self._logical - event.num_protected, self._logical)):
            self.add("newest", f"{event!r} drops some of the newest {event.num_protected}")
        return after


def _lengths(start: int, end: int) -> Iterator[int]:
    """Yield ascending lengths from a start to an end, both with their neighbours, and some in between."""
    inner = range(start + _NUM_ASKED, end - _NUM_ASKED, max((end - start) // _NUM_ASKED, 1))
    yield from sorted(
        {*range(start, min(start + _NUM_ASKED, end + 1)), *inner, *range(max(end - _NUM_ASKED, start), end + 1)}
    )

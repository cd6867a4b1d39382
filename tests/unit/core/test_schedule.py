"""When events are due, against a count of single appends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.schedule import EventSchedule, block_schedule, token_schedule
from tests.strategies import block_sizes


def simulate_tokens(budget: int, buffer_size: int, length: int) -> list[tuple[int, int, int]]:
    """Return (logical length, physical length, dropped) of every event, by appending one entry at a time."""
    events: list[tuple[int, int, int]] = []
    held, since = 0, 0
    for logical in range(1, length + 1):
        held, since = held + 1, since + 1
        is_due = since >= max(buffer_size, 1) if events else held > budget + buffer_size
        if is_due:
            dropped = held - (budget + buffer_size)
            events.append((logical, held, dropped))
            held, since = held - dropped, 0
    return events


def simulate_blocks(budget: int, buffer_size: int, prompt: int, block: int, length: int) -> list[tuple[int, int, int]]:
    """Return the same for the block form: design 3.6 read literally."""
    events: list[tuple[int, int, int]] = []
    held = 0
    for logical in range(1, length + 1):
        held, before = held + 1, held + 1
        while held - (budget + buffer_size) >= block and any(
            prompt <= start and start + block <= held - buffer_size for start in range(0, held, block)
        ):
            held -= block
        if held != before:
            events.append((logical, before, before - held))
    return events


def listed(schedule: EventSchedule, length: int) -> list[tuple[int, int, int]]:
    return [
        (schedule.due_at(i), schedule.length_before(i), schedule.dropped_by(i))
        for i in range(schedule.events_due_by(length))
    ]


@pytest.mark.parametrize(
    ("budget", "buffer_size", "events", "peak"),
    [
        (2048, 64, [(2113, 2113, 1), (2177, 2176, 64), (2241, 2176, 64)], 2176),
        (256, 64, [(321, 321, 1), (385, 384, 64), (449, 384, 64)], 384),
        (8, 1, [(10, 10, 1), (11, 10, 1), (12, 10, 1)], 10),
        (8, 0, [(9, 9, 1), (10, 9, 1), (11, 9, 1)], 9),
        (1, 0, [(2, 2, 1), (3, 2, 1), (4, 2, 1)], 2),
        (1, 3, [(5, 5, 1), (8, 7, 3), (11, 7, 3)], 7),
    ],
)
def test_worked_examples(budget: int, buffer_size: int, events: list[tuple[int, int, int]], peak: int) -> None:
    """Due at, physical length before, dropped."""
    schedule = token_schedule(budget=budget, buffer_size=buffer_size, prompt_length=1)
    assert listed(schedule, events[-1][0]) == events
    assert schedule.peak == peak
    assert schedule.settled == budget + buffer_size


@given(st.integers(1, 40), st.integers(0, 20), st.integers(1, 40))
def test_token_events_are_those_of_single_appends(budget: int, buffer_size: int, prompt: int) -> None:
    schedule = token_schedule(budget=budget, buffer_size=buffer_size, prompt_length=min(prompt, budget))
    assert listed(schedule, 200) == simulate_tokens(budget, buffer_size, 200)
    assert schedule.peak == budget + max(2 * buffer_size, 1)
    assert max(schedule.length_before(i) for i in range(3)) == schedule.peak


@given(st.integers(1, 40), st.integers(0, 20), st.integers(1, 40), block_sizes)
def test_block_events_are_those_of_single_appends(budget: int, buffer_size: int, prompt: int, block: int) -> None:
    prompt = min(prompt, budget)
    schedule = block_schedule(budget=budget, buffer_size=buffer_size, prompt_length=prompt, block_size=block)
    assert listed(schedule, 200) == simulate_blocks(budget, buffer_size, prompt, block, 200)
    assert schedule.settled >= budget + buffer_size
    assert schedule.peak == schedule.first_due <= budget + buffer_size + 2 * block - 1


@given(st.integers(1, 40), st.integers(0, 20), st.integers(0, 300))
def test_lengths_follow_from_the_logical_length(budget: int, buffer_size: int, logical: int) -> None:
    schedule = token_schedule(budget=budget, buffer_size=buffer_size, prompt_length=1)
    due = schedule.events_due_by(logical)
    assert all(schedule.due_at(i) <= logical for i in range(due))
    assert schedule.due_at(due) > logical
    assert schedule.dropped_before(due) == sum(schedule.dropped_by(i) for i in range(due))
    assert schedule.physical_length(logical) == logical - schedule.dropped_before(due) <= schedule.peak
    if due:
        assert schedule.physical_length(schedule.due_at(due - 1)) == schedule.settled


def test_a_generation_that_ends_at_an_event() -> None:
    """The entry that makes it due is the last: held at the peak before, settled after."""
    schedule = token_schedule(budget=8, buffer_size=4, prompt_length=5)
    assert schedule.events_due_by(20) == 2
    assert schedule.physical_length(20) == 15
    assert schedule.events_due_by(21) == 3
    assert (schedule.length_before(2), schedule.physical_length(21)) == (16, 12)


def test_a_budget_beyond_the_context_never_fires() -> None:
    schedule = token_schedule(budget=4096, buffer_size=0, prompt_length=4096)
    assert schedule.events_due_by(4096) == 0
    assert schedule.physical_length(4096) == 4096


@pytest.mark.parametrize("prompt", [1, 7, 8])
def test_a_prompt_up_to_the_budget_is_taken(prompt: int) -> None:
    assert token_schedule(budget=8, buffer_size=4, prompt_length=prompt).first_due == 13


def test_a_longer_prompt_is_rejected_with_both_numbers() -> None:
    message = r"prompt: expected at most 8 tokens \(budget\), got 9"
    with pytest.raises(PolicyUsageError, match=message):
        token_schedule(budget=8, buffer_size=4, prompt_length=9)
    with pytest.raises(PolicyUsageError, match=message):
        block_schedule(budget=8, buffer_size=4, prompt_length=9, block_size=16)


@pytest.mark.parametrize(
    ("values", "reasons"),
    [
        (
            {"budget": 0, "buffer_size": -1},
            ("budget: expected an integer >= 1, got 0", "buffer_size: expected an integer >= 0, got -1"),
        ),
        ({"prompt_length": 0}, ("prompt_length: expected an integer >= 1, got 0",)),
        ({"budget": True}, ("budget: expected an integer >= 1, got True",)),
        ({"block_size": 0}, ("block_size: expected an integer >= 1, got 0",)),
    ],
)
def test_impossible_numbers_are_rejected(values: dict[str, Any], reasons: tuple[str, ...]) -> None:
    with pytest.raises(PolicyUsageError) as caught:
        block_schedule(**{"budget": 8, "buffer_size": 4, "prompt_length": 5, "block_size": 4, **values})
    assert caught.value.reasons == reasons


def test_a_schedule_keeps_something() -> None:
    with pytest.raises(PolicyUsageError, match=r"schedule.interval: expected an integer >= 1, got 0"):
        EventSchedule(first_due=4, interval=0, first_dropped=1)
    with pytest.raises(PolicyUsageError, match=r"schedule.first_dropped: expected less than 4 \(first_due\), got 4"):
        EventSchedule(first_due=4, interval=1, first_dropped=4)


def test_the_peak_may_be_the_first_event() -> None:
    """A schedule of one's own: 20 entries once, then never more than 12."""
    schedule = EventSchedule(first_due=20, interval=2, first_dropped=10)
    assert [schedule.length_before(i) for i in range(3)] == [20, 12, 12]
    assert schedule.peak == 20

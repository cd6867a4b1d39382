"""Who is parked, and why: the worked examples, and what holds for every snapshot."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.parking import ParkingPlan, Pressure, WaitingHead, plan_parking
from kvpolicy.core.ranking import IdleSession, rank_idle_sessions
from tests.strategies import pressures

A = IdleSession("a", priority=0, idle_s=9.0, num_blocks=4)
W = IdleSession("w", priority=1, idle_s=0.0, num_blocks=2, holds_slot=False)
B = IdleSession("b", priority=2, idle_s=1.0, num_blocks=3)
NOTHING = ParkingPlan()


def head(num_lacking: int, num_shared: int = 0) -> WaitingHead:
    return WaitingHead("head", num_lacking_blocks=num_lacking, num_shared_blocks=num_shared)


@pytest.mark.parametrize(
    ("num_free", "growth", "slot", "waiting", "expected"),
    [
        (5, 1, True, head(4), NOTHING),
        (2, 1, True, head(4), ParkingPlan(("b",))),
        (0, 1, True, head(4), ParkingPlan(("b", "w"))),
        (1, 1, True, head(10), NOTHING),
        (0, 2, True, head(9), ParkingPlan(("b",))),
        (2, 1, True, head(9, 6), ParkingPlan(("b",))),
        (5, 1, False, head(4), ParkingPlan(("b",))),
        (0, 0, False, head(5), ParkingPlan(("b", "w"))),
        (0, 1, False, None, ParkingPlan(("b",))),
        (0, 0, True, evolve(head(1), consolidates=True), ParkingPlan(given_up="head")),
    ],
)
def test_the_worked_examples(
    num_free: int, growth: int, *, slot: bool, waiting: WaitingHead | None, expected: ParkingPlan
) -> None:
    pressure = Pressure(
        num_free_blocks=num_free, num_growth_blocks=growth, has_free_slot=slot, head=waiting, sessions=(A, W, B)
    )
    assert plan_parking(pressure) == expected


def test_nobody_goes_for_blocks_where_no_slot_can_be_had() -> None:
    """The head would still not run; it waits for a running request to end."""
    full = Pressure(num_free_blocks=0, num_growth_blocks=0, has_free_slot=False, head=head(2), sessions=(W,))
    assert plan_parking(full) == NOTHING
    assert plan_parking(evolve(full, has_free_slot=True)) == ParkingPlan(("w",))


def test_nobody_goes_for_a_slot_where_the_blocks_cannot_be_had() -> None:
    full = Pressure(num_free_blocks=0, num_growth_blocks=0, has_free_slot=False, head=head(10), sessions=(A, W, B))
    assert plan_parking(full) == NOTHING


@pytest.mark.parametrize(("num_lacking", "slot"), [(0, False), (1, True), (1, False)])
def test_a_consolidation_ahead_of_time_is_given_up_where_it_does_not_fit(num_lacking: int, *, slot: bool) -> None:
    waiting = evolve(head(num_lacking), consolidates=True)
    pressure = Pressure(num_free_blocks=0, num_growth_blocks=0, has_free_slot=slot, head=waiting, sessions=(A, W, B))
    assert plan_parking(pressure) == ParkingPlan(given_up="head")
    fits = evolve(pressure, num_free_blocks=num_lacking, has_free_slot=True)
    assert plan_parking(fits) == NOTHING


def test_blocks_in_the_prefix_cache_are_the_heads() -> None:
    pressure = Pressure(num_free_blocks=1, num_growth_blocks=0, has_free_slot=True, head=head(4), sessions=(A,))
    assert pressure.missing_for_head == 3
    assert pressure.with_shared(2).missing_for_head == 1
    assert evolve(pressure, head=None).with_shared(2) == evolve(pressure, head=None)


def fits(pressure: Pressure, parked: tuple[IdleSession, ...]) -> bool:
    """Whether the head fits once these are gone, counted anew from what each rule says."""
    assert pressure.head is not None
    num_free = pressure.num_free_blocks + sum(session.num_blocks for session in parked)
    needed = pressure.num_growth_blocks + pressure.head.num_lacking_blocks - pressure.head.num_shared_blocks
    return num_free >= needed and (pressure.has_free_slot or any(session.holds_slot for session in parked))


def planned(pressure: Pressure) -> tuple[IdleSession, ...]:
    by_id = {session.request_id: session for session in pressure.sessions}
    return tuple(by_id[request_id] for request_id in plan_parking(pressure).parked)


@given(pressures())
def test_progress_if_parking_can_make_the_head_fit_it_does(pressure: Pressure) -> None:
    """And so nobody holds on to blocks and waits: a head that gets nothing waits for running requests alone."""
    everybody = tuple(session for session in pressure.sessions if session.num_blocks)
    if pressure.head is not None and not pressure.head.consolidates and fits(pressure, everybody):
        assert fits(pressure, planned(pressure))


@given(pressures())
def test_nobody_is_parked_without_need_nor_in_vain(pressure: Pressure) -> None:
    parked = planned(pressure)
    if not parked:
        return
    assert all(session.num_blocks for session in parked)
    for_head = pressure.head is not None and fits(pressure, parked)
    if for_head:
        assert not fits(pressure, parked[:-1])
        assert not fits(pressure, parked[1:])
    else:
        num_blocks = [session.num_blocks for session in parked]
        missing = pressure.num_growth_blocks - pressure.num_free_blocks
        assert sum(num_blocks[:-1]) < missing <= sum(num_blocks)


@given(pressures())
def test_running_requests_get_what_parking_can_give(pressure: Pressure) -> None:
    missing = pressure.num_growth_blocks - pressure.num_free_blocks
    held = sum(session.num_blocks for session in pressure.sessions)
    plan = plan_parking(pressure)
    if 0 < missing <= held and plan.given_up is None:
        assert sum(session.num_blocks for session in planned(pressure)) >= missing


@given(pressures())
def test_a_consolidation_costs_nobody_anything(pressure: Pressure) -> None:
    if pressure.head is not None and pressure.head.consolidates:
        plan = plan_parking(pressure)
        assert plan.parked == ()
        assert plan.given_up == (None if fits(pressure, ()) else pressure.head.request_id)
    else:
        assert plan_parking(pressure).given_up is None


@given(pressures(), st.randoms())
def test_the_order_is_that_of_the_ranking(pressure: Pressure, random: Any) -> None:
    """But for one that gives up its slot: the first that has one."""
    parked = planned(pressure)
    order = rank_idle_sessions(pressure.sessions, sum(session.num_blocks for session in pressure.sessions))
    for_slot = pressure.head is not None and not pressure.has_free_slot and bool(parked) and fits(pressure, parked)
    if for_slot:
        assert parked[0] == next(session for session in order if session.holds_slot)
        order = tuple(session for session in order if session != parked[0])
        parked = parked[1:]
    assert parked == order[: len(parked)]
    shuffled = list(pressure.sessions)
    random.shuffle(shuffled)
    assert plan_parking(evolve(pressure, sessions=tuple(shuffled))) == plan_parking(pressure)


@given(pressures())
def test_after_a_plan_was_carried_out_the_next_one_is_empty(pressure: Pressure) -> None:
    parked = planned(pressure)
    after = evolve(
        pressure,
        num_free_blocks=pressure.num_free_blocks + sum(session.num_blocks for session in parked),
        has_free_slot=pressure.has_free_slot or any(session.holds_slot for session in parked),
        sessions=tuple(session for session in pressure.sessions if session not in parked),
    )
    if parked:
        assert plan_parking(after) == NOTHING


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_free_blocks": -1}, "pressure.num_free_blocks: expected an integer >= 0, got -1"),
        ({"num_growth_blocks": 0.5}, "pressure.num_growth_blocks: expected an integer >= 0, got 0.5"),
        ({"has_free_slot": 1}, "pressure.has_free_slot: expected bool, got 1"),
        ({"sessions": []}, r"pressure.sessions: expected tuple, got \[\]"),
    ],
)
def test_an_impossible_snapshot_is_rejected(values: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"num_free_blocks": 0, "num_growth_blocks": 0, "has_free_slot": True, "sessions": ()}
    with pytest.raises(PolicyUsageError, match=message):
        Pressure(**{**usual, "head": None, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_lacking_blocks": -1}, "head.num_lacking_blocks: expected an integer >= 0, got -1"),
        ({"num_shared_blocks": None}, "head.num_shared_blocks: expected an integer >= 0, got None"),
        ({"consolidates": 0}, "head.consolidates: expected bool, got 0"),
    ],
)
def test_an_impossible_head_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        WaitingHead("head", **{"num_lacking_blocks": 0, **values})

"""Who is parked first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.ranking import IdleSession, rank_idle_sessions
from tests.strategies import idle_sessions

A = IdleSession("a", priority=0, idle_s=9.0, num_blocks=4)
B = IdleSession("b", priority=1, idle_s=1.0, num_blocks=3)
C = IdleSession("c", priority=0, idle_s=2.0, num_blocks=5)


@pytest.mark.parametrize(
    ("need", "expected"),
    [
        (-1, ()),
        (0, ()),
        (1, (B,)),
        (3, (B,)),
        (4, (B, A)),
        (6, (B, A)),
        (7, (B, A)),
        (8, (B, A, C)),
        (12, (B, A, C)),
        (13, ()),
    ],
)
def test_the_worked_example(need: int, expected: tuple[IdleSession, ...]) -> None:
    assert rank_idle_sessions([C, A, B], need) == expected


def test_ties_are_broken_by_blocks_then_by_id() -> None:
    small = IdleSession("a", priority=0, idle_s=1, num_blocks=1)
    large = IdleSession("b", priority=0, idle_s=1, num_blocks=2)
    twin = IdleSession("c", priority=0, idle_s=1, num_blocks=2)
    assert rank_idle_sessions([small, twin, large], 5) == (large, twin, small)


def test_a_session_without_blocks_is_not_parked() -> None:
    empty = IdleSession("e", priority=9, idle_s=99, num_blocks=0)
    assert rank_idle_sessions([empty, A], 1) == (A,)
    assert rank_idle_sessions([empty], 1) == ()


@given(idle_sessions(), st.integers(0, 12), st.randoms())
def test_parking_helps_and_is_not_overdone(sessions: tuple[IdleSession, ...], need: int, random: Any) -> None:
    chosen = rank_idle_sessions(sessions, need)
    num_blocks = sum(session.num_blocks for session in chosen)
    if need > 0 and sum(session.num_blocks for session in sessions) >= need:
        assert num_blocks >= need
        assert num_blocks - chosen[-1].num_blocks < need
    else:
        assert chosen == ()
    assert len(set(chosen)) == len(chosen)
    # More need only makes the list longer, and the order of the argument does not matter.
    assert rank_idle_sessions(sessions, need + 1)[: len(chosen)] in (chosen, ())
    shuffled = list(sessions)
    random.shuffle(shuffled)
    assert rank_idle_sessions(shuffled, need) == chosen


@given(idle_sessions())
def test_a_more_important_session_is_never_parked_before_a_less_important_one(
    sessions: tuple[IdleSession, ...],
) -> None:
    chosen = rank_idle_sessions(sessions, sum(session.num_blocks for session in sessions))
    priorities = [session.priority for session in chosen]
    assert priorities == sorted(priorities, reverse=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"priority": None}, "session.priority: expected an integer, got None"),
        ({"priority": True}, "session.priority: expected an integer, got True"),
        ({"idle_s": -0.1}, "session.idle_s: expected a finite number >= 0, got -0.1"),
        ({"idle_s": float("nan")}, "session.idle_s: expected a finite number >= 0, got nan"),
        ({"idle_s": float("inf")}, "session.idle_s: expected a finite number >= 0, got inf"),
        ({"idle_s": "1"}, "session.idle_s: expected a finite number >= 0, got '1'"),
        ({"holds_slot": None}, "session.holds_slot: expected bool, got None"),
        ({"num_blocks": -1}, "session.num_blocks: expected an integer >= 0, got -1"),
    ],
)
def test_an_impossible_session_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        IdleSession("a", **{"priority": 0, "idle_s": 0.0, "num_blocks": 0, **values})

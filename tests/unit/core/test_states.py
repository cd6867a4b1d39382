"""Every state with every input."""

from __future__ import annotations

from itertools import product

import pytest

from kvpolicy.core.errors import InvariantError
from kvpolicy.core.states import TRANSITIONS, SessionInput, SessionState, next_state

# Rows: states; columns: inputs in the order of the enum. A dash is an error, a number the ordinal of the next state.
#                 CHUNK FIRST STOP CONSOLIDATE CONSOLIDATED PARK PREEMPT CLOSE FREED FAIL
TABLE = {
    "OPENED":        "1     -     -    -           -            -    -       6     -     7",
    "PREFILLING":    "-     2     3    -           -            1    1       6     -     7",
    "REPLYING":      "-     2     3    -           -            -    1       6     -     7",
    "IDLE":          "1     -     -    4           -            5    -       6     -     7",
    "CONSOLIDATING": "-     -     -    -           3            5    4       6     -     7",
    "PARKED":        "1     -     -    -           -            -    -       6     -     7",
    "CLOSING":       "-     -     -    -           -            -    -       -     7     7",
    "CLOSED":        "-     -     -    -           -            -    -       -     -     -",
}  # fmt: skip


def test_the_table_covers_every_state_and_input() -> None:
    assert list(TABLE) == [state.name for state in SessionState]
    assert {len(row.split()) for row in TABLE.values()} == {len(SessionInput)}


@pytest.mark.parametrize(("state", "event"), list(product(SessionState, SessionInput)))
def test_every_state_and_input_has_its_outcome(state: SessionState, event: SessionInput) -> None:
    entry = TABLE[state.name].split()[list(SessionInput).index(event)]
    if entry == "-":
        with pytest.raises(InvariantError, match=f"while {state.value}, got {event.value}"):
            next_state(state, event)
    else:
        assert next_state(state, event) is list(SessionState)[int(entry)]


def test_the_error_names_what_is_possible() -> None:
    with pytest.raises(InvariantError, match="expected one of chunk, close, fail while parked, got stop"):
        next_state(SessionState.PARKED, SessionInput.STOP)
    with pytest.raises(InvariantError, match="expected one of nothing while closed, got close"):
        next_state(SessionState.CLOSED, SessionInput.CLOSE)


def test_every_state_is_reached_and_every_session_can_end() -> None:
    reached = {SessionState.OPENED}
    while True:
        more = {after for (before, _), after in TRANSITIONS.items() if before in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(SessionState)
    for state in set(SessionState) - {SessionState.CLOSED}:
        assert next_state(state, SessionInput.FAIL) is SessionState.CLOSED


def test_the_table_cannot_be_edited() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[SessionState.CLOSED, SessionInput.CHUNK] = SessionState.IDLE  # type: ignore[index]  # the point

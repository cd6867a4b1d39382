"""Where a token is cached and what it is rotated by."""

from __future__ import annotations

import pytest

from kvpolicy.core.errors import InvariantError, PolicyUsageError
from kvpolicy.core.positions import PositionMap


def test_nothing_is_shifted_before_the_first_eviction() -> None:
    positions = PositionMap()
    assert (positions.slot_index(100), positions.rope_position(100)) == (100, 100)


def test_a_session_shifts_positions() -> None:
    positions = PositionMap(rope_shift=32)
    assert (positions.slot_index(100), positions.rope_position(100)) == (100, 132)


def test_a_compacted_generation_shifts_slots() -> None:
    positions = PositionMap(kv_shift=64)
    assert (positions.slot_index(2500), positions.rope_position(2500)) == (2436, 2500)


def test_there_is_no_slot_below_the_first() -> None:
    positions = PositionMap(kv_shift=64)
    assert positions.slot_index(64) == 0
    with pytest.raises(InvariantError, match=r"index: expected an integer >= 64 \(kv_shift\), got 63"):
        positions.slot_index(63)


def test_a_shift_is_a_count_and_both_are_checked_at_once() -> None:
    with pytest.raises(PolicyUsageError) as caught:
        PositionMap(kv_shift=-1, rope_shift=True)
    assert caught.value.reasons == (
        "positions.kv_shift: expected an integer >= 0, got -1",
        "positions.rope_shift: expected an integer >= 0, got True",
    )

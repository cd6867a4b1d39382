"""The counts of a session."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import fields_dict

from kvpolicy.core.counts import SessionCounts
from kvpolicy.core.errors import PolicyUsageError


def test_each_thing_that_happens_counts_once() -> None:
    counts = SessionCounts().with_eviction(32).with_eviction(16).with_consolidation().with_park()
    assert counts == SessionCounts(num_evictions=2, num_evicted_tokens=48, num_consolidations=1, num_parks=1)


def test_a_difference_is_what_happened_in_between() -> None:
    before = SessionCounts().with_eviction(32).with_park()
    assert before.with_consolidation().with_eviction(16).since(before) == SessionCounts(
        num_evictions=1, num_evicted_tokens=16, num_consolidations=1
    )
    assert before.since(before) == SessionCounts()


def test_nothing_is_uncounted() -> None:
    with pytest.raises(PolicyUsageError, match=r"counts.num_parks: expected an integer >= 0, got -1"):
        SessionCounts().since(SessionCounts().with_park())


@pytest.mark.parametrize("name", fields_dict(SessionCounts))
@pytest.mark.parametrize("value", [-1, True, 1.0, None])
def test_counts_are_checked(name: str, value: Any) -> None:
    with pytest.raises(PolicyUsageError, match=rf"counts.{name}: expected an integer >= 0, got {value!r}"):
        SessionCounts(**{name: value})

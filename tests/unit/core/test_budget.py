"""Budgets, limits and admission."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.core.budget import RetentionBudget, SessionLimits, admission_errors
from kvpolicy.core.errors import PolicyUsageError
from tests.strategies import Setup, setups

LIMITS = SessionLimits(block_size=16, context_limit=16384, trained_range=32768, num_pool_blocks=2000)

VIOLATIONS = [
    ({"content_segments": 0}, "retention.content_segments: expected an integer >= 1, got 0"),
    ({"content_segments": None}, "retention.content_segments: expected an integer >= 1, got None"),
    ({"content_segments": 2.0}, "retention.content_segments: expected an integer >= 1, got 2.0"),
    ({"text_tokens": 0}, "retention.text_tokens: expected an integer >= 1 or None, got 0"),
    ({"text_tokens": True}, "retention.text_tokens: expected an integer >= 1 or None, got True"),
    (
        {"text_tokens": 3000, "total_tokens": 2000},
        "retention.text_tokens: expected at most 2000 (total_tokens), got 3000",
    ),
    (
        {"total_tokens": 100},
        "retention.total_tokens: expected an integer >= 1024 (min_total_tokens) or None, got 100",
    ),
    (
        {"total_tokens": 63, "min_total_tokens": 64},
        "retention.total_tokens: expected an integer >= 64 (min_total_tokens) or None, got 63",
    ),
    (
        {"total_tokens": "big"},
        "retention.total_tokens: expected an integer >= 1024 (min_total_tokens) or None, got 'big'",
    ),
    ({"anchor_tokens": 0}, "retention.anchor_tokens: expected an integer >= 1 or None, got 0"),
    ({"min_total_tokens": 0}, "retention.min_total_tokens: expected an integer >= 1, got 0"),
    *(
        (
            {"consolidation_threshold": value},
            f"retention.consolidation_threshold: expected a number above 0 and up to 1, got {value!r}",
        )
        for value in (0, 0.0, -0.5, 1.01, math.nan, math.inf, True, "0.7", None)
    ),
]


@pytest.mark.parametrize(("values", "reason"), VIOLATIONS)
def test_an_impossible_budget_is_rejected(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(PolicyUsageError) as constructed:
        RetentionBudget(**values)
    with pytest.raises(PolicyUsageError) as mapped:
        RetentionBudget.from_mapping(values)
    assert constructed.value.reasons == mapped.value.reasons == (reason,)


def test_every_violation_is_reported_at_once() -> None:
    with pytest.raises(PolicyUsageError) as caught:
        RetentionBudget(
            content_segments=0,
            text_tokens=9,
            total_tokens=5,
            anchor_tokens=-1,
            consolidation_threshold=2,
            min_total_tokens=False,
        )
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == [
        "retention.content_segments",
        "retention.anchor_tokens",
        "retention.min_total_tokens",
        "retention.consolidation_threshold",
        "retention.text_tokens",
    ]


def test_a_total_is_a_count_even_where_the_minimum_is_not() -> None:
    with pytest.raises(PolicyUsageError, match=r"retention.total_tokens: expected an integer >= 1 or None, got 0"):
        RetentionBudget(total_tokens=0, min_total_tokens=None)  # type: ignore[arg-type]  # the point


def test_the_defaults() -> None:
    assert RetentionBudget().to_mapping() == {
        "content_segments": 30,
        "text_tokens": None,
        "total_tokens": None,
        "anchor_tokens": None,
        "consolidation_threshold": 0.7,
        "min_total_tokens": 1024,
    }


@pytest.mark.parametrize(
    "budget",
    [
        RetentionBudget(content_segments=1, text_tokens=1024, total_tokens=1024),
        RetentionBudget(anchor_tokens=1, consolidation_threshold=1),
        RetentionBudget(total_tokens=1, min_total_tokens=1, text_tokens=1, consolidation_threshold=1e-9),
        RetentionBudget(text_tokens=1),
    ],
)
def test_the_extremes_are_allowed_and_round_trip(budget: RetentionBudget) -> None:
    assert RetentionBudget.from_mapping(json.loads(json.dumps(budget.to_mapping()))) == budget


def test_a_mapping_may_leave_out_everything() -> None:
    assert RetentionBudget.from_mapping({}) == RetentionBudget()
    assert RetentionBudget.from_mapping({"total_tokens": None}) == RetentionBudget()


def test_unknown_keys_are_rejected_together_with_everything_else() -> None:
    known = "content_segments, text_tokens, total_tokens, anchor_tokens, consolidation_threshold, min_total_tokens"
    with pytest.raises(PolicyUsageError) as caught:
        RetentionBudget.from_mapping({"total": 5, 3: 4, "content_segments": "many"})  # type: ignore[dict-item] # on purpose
    assert caught.value.reasons == (
        f"retention: unknown key 'total'; known keys: {known}",
        f"retention: unknown key 3; known keys: {known}",
        "retention.content_segments: expected an integer >= 1, got 'many'",
    )
    with pytest.raises(PolicyUsageError, match="unknown key 'total'"):
        RetentionBudget.from_mapping({"total": 5})


def test_a_budget_comes_from_a_mapping() -> None:
    with pytest.raises(PolicyUsageError, match="retention: expected Mapping, got 5"):
        RetentionBudget.from_mapping(5)  # type: ignore[arg-type]  # the point


@given(setups())
def test_any_budget_round_trips(setup: Setup) -> None:
    assert RetentionBudget.from_mapping(setup.budget.to_mapping()) == setup.budget


@pytest.mark.parametrize(
    ("trained_range", "context_limit", "max_tokens", "total"),
    [
        (32768, 16384, 24, 7000),
        (4096, 16384, 24, 2811),
        (32768, 4096, 24, 2811),
        (32768, 4096, 100, 2735),
        (100_000, 10_081, 24, 7000),
        (100_000, 10_080, 24, 7000),
        (100_000, 10_079, 24, 6999),
    ],
)
def test_the_default_total(trained_range: int, context_limit: int, max_tokens: int, total: int) -> None:
    limits = evolve(LIMITS, trained_range=trained_range, context_limit=context_limit)
    resolved = RetentionBudget(content_segments=3).resolved(limits, max_tokens)
    assert resolved == RetentionBudget(content_segments=3, total_tokens=total)
    assert resolved.require_total() == total


def test_the_default_total_is_admitted() -> None:
    limits = evolve(LIMITS, trained_range=4096)
    budget = RetentionBudget().resolved(limits, 24)
    assert admission_errors(budget, limits, first_chunk_tokens=500, max_tokens=24) == ()


def test_a_total_that_is_set_stays() -> None:
    budget = RetentionBudget(total_tokens=2000)
    assert budget.resolved(LIMITS, 24) is budget
    assert budget.resolved(LIMITS, None) is budget


def test_a_default_below_the_minimum_is_refused_with_all_numbers() -> None:
    limits = evolve(LIMITS, trained_range=2048, context_limit=1024)
    with pytest.raises(PolicyUsageError) as caught:
        RetentionBudget().resolved(limits, 24)
    (reason,) = caught.value.reasons
    for number in ("660", "1377", "2048", "1024 (min_total_tokens)", "max_tokens 24"):
        assert number in reason
    least = RetentionBudget(min_total_tokens=660)
    assert least.resolved(limits, 24).total_tokens == 660
    with pytest.raises(PolicyUsageError, match=r"expected at least 661 \(min_total_tokens\)"):
        evolve(least, min_total_tokens=661).resolved(limits, 24)


def test_a_default_below_the_text_budget_is_refused() -> None:
    with pytest.raises(PolicyUsageError, match=r"text_tokens: expected at most 7000 \(total_tokens\), got 7001"):
        RetentionBudget(text_tokens=7001).resolved(LIMITS, 24)


@pytest.mark.parametrize("max_tokens", [None, 0, -1, True])
def test_a_session_needs_a_finite_reply(max_tokens: int | None) -> None:
    reason = f"max_tokens: a session needs a finite max_tokens, an integer >= 1, got {max_tokens!r}"
    with pytest.raises(PolicyUsageError) as caught:
        RetentionBudget().resolved(LIMITS, max_tokens)
    assert caught.value.reasons == (reason,)
    budget = RetentionBudget(total_tokens=2000)
    assert admission_errors(budget, LIMITS, first_chunk_tokens=10, max_tokens=max_tokens) == (reason,)


def test_a_budget_is_resolved_before_admission() -> None:
    with pytest.raises(PolicyUsageError, match=r"retention.total_tokens: expected an integer, got None"):
        admission_errors(RetentionBudget(), LIMITS, first_chunk_tokens=10, max_tokens=24)


BUDGET = RetentionBudget(total_tokens=2000)


@pytest.mark.parametrize(
    ("budget", "limits", "first_chunk", "fits", "says"),
    [
        # One below the limit that refuses it, then the limit itself.
        (BUDGET, evolve(LIMITS, context_limit=2001), 100, True, ()),
        (BUDGET, evolve(LIMITS, context_limit=2000), 100, False, ("context limit 2000", "got 2000")),
        (evolve(BUDGET, consolidation_threshold=0.5), evolve(LIMITS, trained_range=4001), 100, True, ()),
        (
            evolve(BUDGET, consolidation_threshold=0.5),
            evolve(LIMITS, trained_range=4000),
            100,
            False,
            ("0.5 (consolidation_threshold)", "4000 (trained range)", "got 2000"),
        ),
        (BUDGET, evolve(LIMITS, num_pool_blocks=126), 100, True, ()),
        (BUDGET, evolve(LIMITS, num_pool_blocks=125), 100, False, ("2000 tokens need 126 blocks of 16", "has 125")),
        (evolve(BUDGET, anchor_tokens=4), LIMITS, 1976, True, ()),
        (evolve(BUDGET, anchor_tokens=4), LIMITS, 1977, False, ("first chunk: 1977", "max_tokens 24", "2000")),
        (BUDGET, LIMITS, 1943, True, ()),
        (BUDGET, LIMITS, 1944, False, ("anchor: 1944", "max_tokens 24", "32 for two blocks", "total_tokens 2000")),
        (evolve(BUDGET, anchor_tokens=1944), LIMITS, 1950, False, ("anchor: 1944",)),
        (BUDGET, LIMITS, 0, False, ("first chunk: expected an integer >= 1, got 0",)),
    ],
)
def test_admission_at_its_limits(
    budget: RetentionBudget, limits: SessionLimits, first_chunk: int, *, fits: bool, says: tuple[str, ...]
) -> None:
    errors = admission_errors(budget, limits, first_chunk_tokens=first_chunk, max_tokens=24)
    assert len(errors) == (not fits)
    for text in says:
        assert text in errors[0]


def test_the_advice_to_a_first_chunk_that_does_not_fit_can_be_followed() -> None:
    """2000 - 33 is what pinned tokens and the longest reply can have together, 2000 what chunk and reply can have."""
    (reason,) = admission_errors(BUDGET, LIMITS, first_chunk_tokens=1950, max_tokens=24)
    assert reason.endswith(
        "; pin at most 1943 tokens (a shorter first chunk, or retention.anchor_tokens), lower max_tokens to 17 or open "
        "a session with a larger retention.total_tokens"
    )
    assert admission_errors(BUDGET, LIMITS, first_chunk_tokens=1943, max_tokens=24) == ()
    assert admission_errors(BUDGET, LIMITS, first_chunk_tokens=1950, max_tokens=17) == ()
    assert admission_errors(evolve(BUDGET, anchor_tokens=1943), LIMITS, first_chunk_tokens=1950, max_tokens=24) == ()
    sinks = evolve(BUDGET, anchor_tokens=4)
    (reason,) = admission_errors(sinks, LIMITS, first_chunk_tokens=1990, max_tokens=24)
    assert reason.endswith(
        "; send a chunk of at most 1976 tokens, lower max_tokens to 10 or open a session with a larger "
        "retention.total_tokens"
    )
    assert admission_errors(sinks, LIMITS, first_chunk_tokens=1976, max_tokens=24) == ()
    assert admission_errors(sinks, LIMITS, first_chunk_tokens=1990, max_tokens=10) == ()
    # No chunk is short enough for a reply like this one.
    (reason,) = admission_errors(BUDGET, LIMITS, first_chunk_tokens=10, max_tokens=2000)
    assert reason.endswith("; lower max_tokens to 1957 or open a session with a larger retention.total_tokens")
    assert admission_errors(BUDGET, LIMITS, first_chunk_tokens=10, max_tokens=1957) == ()


def test_admission_reports_every_reason_at_once() -> None:
    limits = SessionLimits(block_size=16, context_limit=1500, trained_range=2000, num_pool_blocks=10)
    errors = admission_errors(evolve(BUDGET, anchor_tokens=1999), limits, first_chunk_tokens=2000, max_tokens=24)
    assert [error.partition(":")[0] for error in errors] == [
        "retention.total_tokens",
        "retention.total_tokens",
        "retention.total_tokens",
        "first chunk",
        "anchor",
    ]


@given(setups())
def test_the_strategy_builds_admitted_sessions(setup: Setup) -> None:
    errors = admission_errors(
        setup.budget, setup.limits, first_chunk_tokens=setup.first_chunk, max_tokens=setup.max_tokens
    )
    assert errors == ()


@given(st.integers(1, 64), st.integers(1, 40_000), st.integers(1, 40_000), st.integers(1, 200))
def test_a_default_total_leaves_room_in_range_and_context(
    block_size: int, context_limit: int, trained_range: int, max_tokens: int
) -> None:
    limits = SessionLimits(
        block_size=block_size, context_limit=context_limit, trained_range=trained_range, num_pool_blocks=10**6
    )
    try:
        budget = RetentionBudget().resolved(limits, max_tokens)
    except PolicyUsageError:
        return
    assert 1024 <= budget.require_total() <= 7000
    anchor = budget.require_total() - max_tokens - 2 * block_size - 1
    assert admission_errors(budget, limits, first_chunk_tokens=max(1, anchor), max_tokens=max_tokens) == ()


@pytest.mark.parametrize("name", ["block_size", "context_limit", "trained_range", "num_pool_blocks"])
@pytest.mark.parametrize("value", [0, -1, True, None, 2.0])
def test_limits_are_positive_integers(name: str, value: Any) -> None:
    with pytest.raises(PolicyUsageError, match=rf"limits.{name}: expected an integer >= 1, got {value!r}"):
        evolve(LIMITS, **{name: value})


def test_all_limits_are_checked_at_once() -> None:
    with pytest.raises(PolicyUsageError) as caught:
        SessionLimits(block_size=0, context_limit=0, trained_range=0, num_pool_blocks=0)
    assert len(caught.value.reasons) == 4

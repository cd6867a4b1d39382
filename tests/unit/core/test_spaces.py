"""Ranges and whole blocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from kvpolicy.core.checks import is_at_least, is_number
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.spaces import BlockSpan, TokenRange, align_inward, blocks_for
from tests.strategies import block_sizes, token_ranges


@pytest.mark.parametrize(
    ("start", "end", "first", "last"),
    [
        (0, 30, 0, 1),
        (0, 32, 0, 2),
        (1, 32, 1, 2),
        (15, 49, 1, 3),
        (16, 16, 1, 1),
        (1, 31, 1, 1),
        (17, 31, 2, 2),
        (0, 0, 0, 0),
        (0, 15, 0, 0),
    ],
)
def test_alignment_in_blocks_of_16(start: int, end: int, first: int, last: int) -> None:
    span = align_inward(TokenRange(start, end), 16)
    assert (span.first, span.last, span.block_size) == (first, last, 16)
    assert span.tokens == TokenRange(16 * first, 16 * last)
    assert span.num_blocks == last - first
    assert span.is_empty == (first == last)


@given(token_ranges(), block_sizes)
def test_the_aligned_range_is_the_largest_of_whole_blocks_inside(asked: TokenRange, block_size: int) -> None:
    span = align_inward(asked, block_size)
    inside = [
        block
        for block in range(asked.end // block_size + 1)
        if asked.start <= block * block_size and (block + 1) * block_size <= asked.end
    ]
    assert list(range(span.first, span.last)) == inside
    assert span.is_empty or asked.contains(span.tokens)
    assert span.tokens.width == span.num_blocks * block_size


@given(token_ranges(), block_sizes)
def test_alignment_leaves_less_than_a_block_at_either_end(asked: TokenRange, block_size: int) -> None:
    span = align_inward(asked, block_size)
    if span.is_empty:
        assert asked.width <= 2 * (block_size - 1)
    else:
        assert span.tokens.start - asked.start < block_size
        assert asked.end - span.tokens.end < block_size


@given(token_ranges(longest=20), token_ranges(longest=20))
def test_containment_is_that_of_the_sets(one: TokenRange, other: TokenRange) -> None:
    tokens, others = set(range(one.start, one.end)), set(range(other.start, other.end))
    assert one.width == len(tokens)
    assert one.is_empty == (not tokens)
    if others:
        assert one.contains(other) == (others <= tokens)
    else:
        assert one.contains(other) == (one.start <= other.start <= one.end)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (7000, 438)])
def test_blocks_for_16(num_tokens: int, num_blocks: int) -> None:
    assert blocks_for(num_tokens, 16) == num_blocks


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (-1, 5, "range.start: expected an integer >= 0, got -1"),
        (True, 5, "range.start: expected an integer >= 0, got True"),
        (1.0, 5, "range.start: expected an integer >= 0, got 1.0"),
        (3, 2, r"range.end: expected an integer >= 3 \(start\), got 2"),
        (0, None, r"range.end: expected an integer >= 0 \(start\), got None"),
    ],
)
def test_an_impossible_range_is_rejected(start: Any, end: Any, message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        TokenRange(start, end)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"first": -1}, "span.first: expected an integer >= 0, got -1"),
        ({"last": 1}, r"span.last: expected an integer >= 2 \(first\), got 1"),
        ({"block_size": 0}, "span.block_size: expected an integer >= 1, got 0"),
    ],
)
def test_an_impossible_span_is_rejected(values: dict[str, int], message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        BlockSpan(**{"first": 2, "last": 3, "block_size": 16, **values})


def test_blocks_have_at_least_one_token() -> None:
    with pytest.raises(PolicyUsageError, match="block_size: expected an integer >= 1, got 0"):
        align_inward(TokenRange(0, 5), 0)


def test_a_bool_is_no_number() -> None:
    assert not is_at_least(True, 0)  # noqa: FBT003 - the point
    assert not is_number(False)  # noqa: FBT003 - the point
    assert is_number(0.5)
    assert is_number(2)

"""The closed set of draws."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvpolicy.core.draws import BlockDraw, RingDraw, UniformDraw, draw_errors
from kvpolicy.core.errors import PolicyUsageError


@pytest.mark.parametrize("draw", [UniformDraw(), UniformDraw(is_shared=True), RingDraw(3), BlockDraw(16)])
def test_these_are_draws_and_values(draw: Any) -> None:
    assert draw_errors(draw) == ()
    assert len({draw, attrs.evolve(draw)}) == 1


@pytest.mark.parametrize("draw", [None, "uniform", UniformDraw])
def test_nothing_else_is_one(draw: Any) -> None:
    expected = f"event.draw: expected one of UniformDraw, RingDraw, BlockDraw, got {draw!r}"
    assert draw_errors(draw) == (expected,)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (UniformDraw, {"is_shared": 1}, "draw.is_shared: expected True or False, got 1"),
        (RingDraw, {"start": -1}, "draw.start: expected an integer >= 0, got -1"),
        (BlockDraw, {"block_size": 0}, "draw.block_size: expected an integer >= 1, got 0"),
    ],
)
def test_parameters_are_checked(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        kind(**values)

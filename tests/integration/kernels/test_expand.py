"""The op ``expand``: every implementation gives the moves of the reference, in its order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
from hypothesis import example, given, settings

from kvpolicy.core.compaction import CompactionEvent, expand
from kvpolicy.core.draws import BlockDraw, RingDraw, UniformDraw
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.philox import key_of, philox4x32
from kvpolicy.kernels.expand.spec import HeadGrid, Moves
from kvpolicy.kernels.expand.torch_philox import philox4x32 as torch_philox4x32
from tests.integration.kernels.implementations import FAST, NAMES, expand_moves
from tests.integration.kernels.strategies import grids, lists_of_events

if TYPE_CHECKING:
    from collections.abc import Sequence

VECTORS = Path(__file__).parents[2] / "data" / "philox4x32-10.json"
GRID = HeadGrid(num_layers=2, num_kv_heads=3, first_layer=5, first_kv_head=2)

many = settings(deadline=None, max_examples=150)


def event_of(prompt: int, length: int, dropped: int, protected: int, draw: Any = None) -> CompactionEvent:
    return CompactionEvent(
        key=key_of(7, "request"),
        ordinal=2,
        prompt_length=prompt,
        physical_length=length,
        num_dropped=dropped,
        num_protected=protected,
        draw=draw or UniformDraw(),
    )


def rows(moves: Moves) -> list[tuple[int, ...]]:
    """Return the moves as tuples (layer, request, KV head, source, destination)."""
    for column in moves.columns():
        assert column.dtype == torch.int64
        assert column.shape == (moves.num_moves,)
    return list(zip(*(column.tolist() for column in moves.columns()), strict=True))


def planned(events: Sequence[CompactionEvent], grid: HeadGrid) -> list[tuple[int, ...]]:
    """Return what the core plans, in the order asked for."""
    return [
        (layer, request, kv_head, move.source, move.destination)
        for layer in range(grid.num_layers)
        for request, event in enumerate(events)
        for kv_head in range(grid.num_kv_heads)
        for move in expand(event, grid.first_layer + layer, grid.first_kv_head + kv_head).moves
    ]


@pytest.mark.parametrize("name", NAMES)
@many
@given(lists_of_events(), grids())
@example([], GRID)
@example([event_of(1, 1, 0, 0)], GRID)
@example([event_of(3, 40, 12, 8), event_of(9, 30, 5, 2)], GRID)
@example([event_of(3, 40, 12, 8), event_of(9, 30, 5, 2, RingDraw(18)), event_of(4, 50, 40, 0)], GRID)
@example([event_of(4, 30, 8, 2, BlockDraw(4)), event_of(4, 50, 46, 0)], GRID)
def test_the_moves_are_those_of_the_plan(name: str, events: list[CompactionEvent], grid: HeadGrid) -> None:
    moves = expand_moves(name)(events, grid)
    expected = planned(events, grid)
    assert rows(moves) == expected
    assert moves.layer_starts == [sum(layer < bound for layer, *_ in expected) for bound in range(grid.num_layers + 1)]


@pytest.mark.parametrize("name", FAST)
@settings(deadline=None, max_examples=25)
@given(lists_of_events(widest=1200))
def test_long_requests_too(name: str, events: list[CompactionEvent]) -> None:
    assert rows(expand_moves(name)(events, GRID)) == planned(events, GRID)


@pytest.mark.parametrize("name", FAST)
def test_at_the_size_of_a_real_model(name: str) -> None:
    """Budget 2048, buffer 64: of 1,984 candidates 64 go, in each KV head others."""
    grid = HeadGrid(num_layers=4, num_kv_heads=2, first_layer=30, first_kv_head=6)
    events = [event_of(128, 2176, 64, 64), event_of(64, 384, 64, 64), event_of(128, 2113, 1, 64)]
    assert rows(expand_moves(name)(events, grid)) == planned(events, grid)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=30)
@given(lists_of_events())
def test_parts_of_the_model_make_up_the_whole(name: str, events: list[CompactionEvent]) -> None:
    """Two stages of two layers with two ranks each of two KV heads."""
    whole = rows(expand_moves(name)(events, HeadGrid(num_layers=4, num_kv_heads=4)))
    parts = []
    for first_layer in (0, 2):
        for first_kv_head in (0, 2):
            part = HeadGrid(num_layers=2, num_kv_heads=2, first_layer=first_layer, first_kv_head=first_kv_head)
            parts += [
                (layer + first_layer, request, kv_head + first_kv_head, source, destination)
                for layer, request, kv_head, source, destination in rows(expand_moves(name)(events, part))
            ]
    # Stable, so that the order of the moves of a KV head is compared as well.
    assert sorted(parts, key=lambda row: row[:3]) == whole


@pytest.mark.parametrize("name", FAST)
def test_a_tie_is_settled_by_the_ordinal(name: str) -> None:
    """This key gives two of the 32-bit words of one event twice, and the draw is cut between the two."""
    event, tied = tied_event()
    assert rows(expand_moves(name)([event], HeadGrid(num_layers=1, num_kv_heads=1))) == planned(
        [event], HeadGrid(num_layers=1, num_kv_heads=1)
    )
    first, second = tied
    dropped = expand(event, 0, 0).dropped
    assert 1 + first in dropped
    assert 1 + second not in dropped


def tied_event() -> tuple[CompactionEvent, tuple[int, int]]:
    """Return an event whose last dropped candidate has the priority of the next one, and the ordinals of both.

    Of 200,000 words about five pairs are equal.
    """
    width, key = 200_000, (1, 2)
    words = [word for call in range(width // 4) for word in philox4x32((call, 0, 0, 0), key)]
    ranked = sorted((word, ordinal) for ordinal, word in enumerate(words))
    rank = next(i for i in range(width - 1) if ranked[i][0] == ranked[i + 1][0])
    event = CompactionEvent(
        key=key,
        ordinal=0,
        prompt_length=1,
        physical_length=1 + width,
        num_dropped=rank + 1,
        num_protected=0,
        draw=UniformDraw(),
    )
    return event, (ranked[rank][1], ranked[rank + 1][1])


@pytest.mark.parametrize("count", [1, 5, 99, 100])
@pytest.mark.parametrize("bits", [52, 51, 40])
def test_keys_that_are_not_spread_evenly_are_selected_too(bits: int, count: int) -> None:
    """The quick way expects so many keys below a bound; all keys above half the range leave too few of them."""
    from kvpolicy.kernels.expand import compiled

    keys = (2**52 - 1 - torch.randperm(1000)[:100] * 2 ** (bits - 11)).numpy().astype("uint64")
    assert compiled._nth_smallest(keys, keys.copy(), 100, count) == sorted(keys.tolist())[count - 1]


def test_philox_on_tensors_gives_the_published_vectors() -> None:
    vectors = json.loads(VECTORS.read_text(encoding="utf-8"))["vectors"]
    counters, keys, outputs = (
        torch.tensor([[int(word, 16) for word in vector[name]] for vector in vectors]).T
        for name in ("counter", "key", "output")
    )
    assert torch.equal(torch.stack(torch_philox4x32(tuple(counters), tuple(keys))), outputs)


def test_nothing_is_compiled_after_the_warm_up() -> None:
    from kvpolicy.kernels.expand import compiled

    compiled.warm_up()
    functions: tuple[Any, ...] = (compiled._expand, compiled._draw, compiled._uniform, compiled._ring)
    before = [len(function.signatures) for function in functions]
    events = [
        event_of(3, 40, 12, 8),
        event_of(9, 30, 5, 2, RingDraw(18)),
        event_of(3, 9, 2, 1, UniformDraw(is_shared=True)),
    ]
    for some in ([], events, events[:1]):
        compiled.expand_moves(some, GRID)
    assert [len(function.signatures) for function in functions] == before == [1, 1, 1, 1]


def test_an_impossible_grid_is_rejected() -> None:
    with pytest.raises(PolicyUsageError) as caught:
        attrs.evolve(GRID, num_layers=0, first_kv_head=-1)
    assert caught.value.reasons == (
        "grid.num_layers: expected an integer >= 1, got 0",
        "grid.first_kv_head: expected an integer >= 0, got -1",
    )

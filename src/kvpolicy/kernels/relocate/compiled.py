"""Compiled loops for the CPU. Needs numba.

Nothing is compiled on import. ``warm_up`` does it for the caches of one dtype; otherwise the first call takes a
second or two longer.
"""

# ruff: noqa: PLR0913, PLR0917 - compiled code takes arrays and numbers, not objects

from __future__ import annotations

from itertools import accumulate, chain
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
from numba import njit

from kvpolicy.kernels.expand.spec import moves_of
from kvpolicy.kernels.layout import KVLayout, PermutedLayout, StridedLayout, bits_of
from kvpolicy.kernels.relocate.spec import cell_maps, outside_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpolicy.kernels.expand.spec import Moves

_F = TypeVar("_F", bound="Callable[..., object]")


def relocate(caches: Sequence[torch.Tensor], layout: KVLayout, moves: Moves, tables: Sequence[Sequence[int]]) -> None:
    """Copy cells, in place: see ``kvpolicy.kernels.relocate.spec``. Everything is on the CPU."""
    maps = cell_maps(caches, layout, moves, tables)
    if moves.num_moves == 0:
        return
    _, request, kv_head, source, destination = (np.ascontiguousarray(column.numpy()) for column in moves.columns())
    block_ids = np.fromiter(chain.from_iterable(tables), dtype=np.int64)
    starts = np.fromiter(accumulate(map(len, tables), initial=0), dtype=np.int64)
    places = np.empty((4, moves.num_moves), dtype=np.int64)
    wrong = _resolve(request, (source, destination), (block_ids, starts), layout.block_size, places)
    if wrong >= 0:
        found = int(request[wrong])
        raise outside_table(found, max(int(source[wrong]), int(destination[wrong])), len(tables[found]))
    bounds = zip(moves.layer_starts, moves.layer_starts[1:], strict=False)
    for cache, cell_map, bound in zip(caches, maps, bounds, strict=True):
        offsets = np.ascontiguousarray(cell_map.offsets.numpy())
        copy = _copy_rows if isinstance(layout, StridedLayout) and cache.stride(-1) == 1 else _copy_elements
        copy(_flat(cache), offsets, (cell_map.block_stride, cell_map.head_stride), kv_head, places, bound)


def warm_up(dtype: torch.dtype) -> None:
    """Compile now, for caches of a dtype."""
    moves = moves_of(torch.zeros((5, 1), dtype=torch.int64), num_layers=1)
    cache = torch.zeros((1, 1, 1, 2), dtype=dtype)
    backwards = PermutedLayout(block_size=1, head_size=1, offsets=torch.tensor([[1, 0]]))
    for layout in (StridedLayout(block_size=1, head_size=1), backwards):
        relocate([cache], layout, moves, [[0]])


def _flat(cache: torch.Tensor) -> np.ndarray:
    """Return the bits from the first element of a cache to the last one in its storage."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    return bits_of(cache).as_strided((span,), (1,)).numpy()


def _jit(function: _F) -> _F:
    return cast("_F", njit(nogil=True)(function))


@_jit
def _resolve(
    request: np.ndarray,
    cells: tuple[np.ndarray, np.ndarray],
    tables: tuple[np.ndarray, np.ndarray],
    block_size: int,
    places: np.ndarray,
) -> int:
    """Fill ``places``: block and token of the source, block and token of the destination.

    Return the first move that lies outside its request's table, or -1.
    """
    block_ids, starts = tables
    for side in range(2):
        for i in range(len(request)):
            index, token = divmod(cells[side][i], block_size)
            first, last = starts[request[i]], starts[request[i] + 1]
            if first + index >= last:
                return i
            places[2 * side, i] = block_ids[first + index]
            places[2 * side + 1, i] = token
    return -1


@_jit
def _copy_elements(
    flat: np.ndarray,
    offsets: np.ndarray,
    strides: tuple[int, int],
    kv_head: np.ndarray,
    places: np.ndarray,
    bound: tuple[int, int],
) -> None:
    """Copy the moves from ``bound[0]`` to ``bound[1]`` of one cache, each element to where the offsets say."""
    block_stride, head_stride = strides
    num_columns = offsets.shape[1]
    for i in range(bound[0], bound[1]):
        head = kv_head[i] * head_stride
        # Unsigned, or every access would first ask whether it counts from the end.
        source = np.uint64(places[0, i] * block_stride + head)
        destination = np.uint64(places[2, i] * block_stride + head)
        here, there = offsets[places[1, i]], offsets[places[3, i]]
        for column in range(num_columns):
            flat[destination + np.uint64(there[column])] = flat[source + np.uint64(here[column])]


@_jit
def _copy_rows(
    flat: np.ndarray,
    offsets: np.ndarray,
    strides: tuple[int, int],
    kv_head: np.ndarray,
    places: np.ndarray,
    bound: tuple[int, int],
) -> None:
    """Do the same for cells whose elements follow one another."""
    block_stride, head_stride = strides
    num_columns = offsets.shape[1]
    for i in range(bound[0], bound[1]):
        head = kv_head[i] * head_stride
        source = places[0, i] * block_stride + head + offsets[places[1, i], 0]
        destination = places[2, i] * block_stride + head + offsets[places[3, i], 0]
        flat[destination : destination + num_columns] = flat[source : source + num_columns]

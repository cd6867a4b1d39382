"""Loops: one cell at a time, one element at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.kernels.layout import CellMap, KVLayout, bits_of
from kvpolicy.kernels.relocate.spec import cell_maps, outside_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvpolicy.kernels.expand.spec import Moves


def relocate(caches: Sequence[torch.Tensor], layout: KVLayout, moves: Moves, tables: Sequence[Sequence[int]]) -> None:
    """Copy cells, in place: see ``kvpolicy.kernels.relocate.spec``."""
    maps = cell_maps(caches, layout, moves, tables)
    rows = list(zip(*(column.tolist() for column in moves.columns()), strict=True))
    for _, request, _, *cells in rows:
        if max(cells) // layout.block_size >= len(tables[request]):
            raise outside_table(request, max(cells), len(tables[request]))
    # One dimension over everything from the first element of the cache to the last one of its storage.
    flat = [bits_of(cache).as_strided((_span(cache),), (1,)) for cache in caches]
    for layer, request, kv_head, *cells in rows:
        addresses = [_addresses(maps[layer], tables[request], kv_head, cell, layout.block_size) for cell in cells]
        for here, there in zip(*addresses, strict=True):
            flat[layer][there] = flat[layer][here]


def _addresses(cell_map: CellMap, table: Sequence[int], kv_head: int, cell: int, block_size: int) -> list[int]:
    base = table[cell // block_size] * cell_map.block_stride + kv_head * cell_map.head_stride
    return [base + offset for offset in cell_map.offsets[cell % block_size].tolist()]


def _span(cache: torch.Tensor) -> int:
    return 1 + sum(int((size - 1) * stride) for size, stride in zip(cache.shape, cache.stride(), strict=True))

"""Vectorised: per layer one gather and one scatter, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpolicy.kernels.relocate.spec import cell_maps, outside_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpolicy.kernels.expand.spec import Moves
    from kvpolicy.kernels.layout import KVLayout

_NO_BLOCK = -1


def relocate(caches: Sequence[torch.Tensor], layout: KVLayout, moves: Moves, tables: Sequence[Sequence[int]]) -> None:
    """Copy cells, in place: see ``kvpolicy.kernels.relocate.spec``. Waits for the device, to check the moves."""
    cell_maps(caches, layout, moves, tables)
    if moves.num_moves == 0:
        return
    padded = _padded(tables, moves.request.device)
    source, destination = (_places(moves, cells, padded, layout) for cells in (moves.source, moves.destination))
    for layer, cache in enumerate(caches):
        some = slice(moves.layer_starts[layer], moves.layer_starts[layer + 1])
        heads = moves.kv_head[some]
        cells = layout.read(cache, source[0][some], heads, source[1][some])
        layout.write(cache, destination[0][some], heads, destination[1][some], cells)


def _padded(tables: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return the block ids, int64, shape (num_requests, longest table)."""
    longest = max(len(table) for table in tables)
    rows = [[*table, *[_NO_BLOCK] * (longest - len(table))] for table in tables]
    return torch.tensor(rows, dtype=torch.int64).to(device)


def _places(
    moves: Moves, cells: torch.Tensor, padded: torch.Tensor, layout: KVLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block ids and places in the block of KV indices, both int64, shape (num_moves,)."""
    index, tokens = cells // layout.block_size, cells % layout.block_size
    blocks = padded[moves.request, index.clamp(max=padded.shape[1] - 1)]
    wrong = (blocks == _NO_BLOCK) | (index >= padded.shape[1])
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        request = int(moves.request[first])
        raise outside_table(request, int(cells[first]), int((padded[request] != _NO_BLOCK).sum()))
    return blocks, tokens

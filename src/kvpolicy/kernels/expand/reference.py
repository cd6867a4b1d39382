"""Loops over the core's planner, one KV head at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpolicy.core.compaction import CompactionEvent, expand
from kvpolicy.kernels.expand.spec import HeadGrid, Moves, moves_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def expand_moves(events: Sequence[CompactionEvent], grid: HeadGrid) -> Moves:
    """Return the moves of every event in every KV head of the grid, on the CPU. Pure."""
    rows = torch.tensor(list(_rows(events, grid)), dtype=torch.int64).reshape(-1, 5)
    return moves_of(rows.T.contiguous(), grid.num_layers)


def _rows(events: Sequence[CompactionEvent], grid: HeadGrid) -> Iterator[tuple[int, int, int, int, int]]:
    for layer in range(grid.num_layers):
        for request, event in enumerate(events):
            for kv_head in range(grid.num_kv_heads):
                plan = expand(event, grid.first_layer + layer, grid.first_kv_head + kv_head)
                for move in plan.moves:
                    yield layer, request, kv_head, move.source, move.destination

"""What every implementation of ``relocate(caches, layout, moves, tables)`` takes and does.

It copies the K and V of each move's source cell to its destination cell, in place:

- ``caches``: one per layer of the grid, shape (num_blocks, num_kv_heads, block_size, 2 * head_size), any dtype;
  the KV heads are those of the grid.
- ``layout``: where the cells are.
- ``moves``: on the device of the caches.
- ``tables``: for each request (event) the block ids by KV index // block_size, as they are before the event: the
  sources lie in blocks that the event may free.

Memory outside the destination cells is not written. Wrong arguments are found before anything is.

Raises:
    InvariantError: more or fewer caches than layers; a block or a KV head that a cache does not have; a move outside
        its request's table.
    EngineContractError: a cache is not shaped as the layout says.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from kvpolicy.core.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvpolicy.kernels.expand.spec import Moves
    from kvpolicy.kernels.layout import CellMap, KVLayout


def cell_maps(
    caches: Sequence[torch.Tensor], layout: KVLayout, moves: Moves, tables: Sequence[Sequence[int]]
) -> list[CellMap]:
    """Check everything but whether the moves stay in the tables, and return the addresses of each cache.

    Raises:
        InvariantError: see above.
        EngineContractError: see above.
    """
    if len(caches) != len(moves.layer_starts) - 1:
        raise InvariantError(f"caches: expected {len(moves.layer_starts) - 1} (one per layer), got {len(caches)}")
    maps = [layout.cell_map(cache) for cache in caches]
    num_blocks, num_kv_heads = (min(cache.shape[axis] for cache in caches) for axis in (0, 1))
    block_ids = set(chain.from_iterable(tables))
    if block_ids and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        got = f"{min(block_ids)} to {max(block_ids)}"
        raise InvariantError(f"tables: expected block ids from 0 to {num_blocks - 1}, got {got}")
    if moves.num_moves and (largest := int(moves.kv_head.max())) >= num_kv_heads:
        raise InvariantError(f"moves: expected KV heads from 0 to {num_kv_heads - 1}, got {largest}")
    return maps


def outside_table(request: int, cell: int, num_blocks: int) -> InvariantError:
    """Return the error for a move that leaves its request's table of ``num_blocks`` blocks."""
    return InvariantError(f"moves: KV index {cell} of request {request} lies outside its table of {num_blocks} blocks")

"""What the block tables of every engine version have to do: its tests call this with tables of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpolicy.adapters.vllm.v0_28.scheduler.block_tables import EngineBlocks

BlockTableMaker = Callable[[Mapping[str, int]], "EngineBlocks"]


def check_block_table(make: BlockTableMaker, *, block_size: int = 16) -> None:
    """Check evictions of token ranges, whatever engine the table belongs to.

    Args:
        make: returns a fresh block table that holds the given requests (id -> number of computed tokens),
            which share no block.
        block_size: tokens in one of its blocks; at least 8.
    """
    _check_ranges(make, block_size)
    _check_unknown(make, block_size)
    _check_repeated(make, block_size)


def _check_ranges(make: BlockTableMaker, size: int) -> None:
    """Six full blocks and five tokens, one range each; another request is never touched."""
    cases = [
        ((0, 2 * size - 2), (0, size, 1)),
        ((1, 2 * size + 1), (size, 2 * size, 1)),
        ((size, 3 * size), (size, 3 * size, 2)),
        ((0, 6 * size), (0, 6 * size, 6)),
        ((5, size), (5, 5, 0)),
        ((size + 1, 2 * size - 1), (size + 1, size + 1, 0)),
        ((size, size), (size, size, 0)),
        ((3 * size, size), (3 * size, 3 * size, 0)),
        ((-3, 3 * size), (-3, -3, 0)),
        ((10 * size, 12 * size), (10 * size, 10 * size, 0)),
        ((5 * size + 1, 100 * size), (6 * size, 7 * size, 1)),
    ]
    for (start, end), expected in cases:
        table = make({"a": 6 * size + 5, "b": 3 * size})
        num_free = table.num_free_blocks()
        got = table.evict_token_range("a", start, end)
        assert got == expected, f"[{start}, {end}): expected {expected}, got {got}"
        assert table.num_blocks("a") == 7 - expected[2], f"[{start}, {end})"
        assert table.num_free_blocks() == num_free + expected[2], f"[{start}, {end})"
        assert table.num_blocks("b") == 3, f"[{start}, {end})"


def _check_unknown(make: BlockTableMaker, size: int) -> None:
    """An unknown request is not an error, and asking about it does not create it."""
    table = make({"a": 2 * size})
    num_free = table.num_free_blocks()
    assert table.evict_token_range("nobody", 0, 2 * size) == (0, 0, 0)
    assert table.evict_token_range("nobody", 7, 2 * size) == (7, 7, 0)
    assert table.num_blocks("nobody") == 0
    assert (table.num_blocks("a"), table.num_free_blocks()) == (2, num_free)


def _check_repeated(make: BlockTableMaker, size: int) -> None:
    """Evictions speak of what is left of the table, down to nothing."""
    table = make({"a": 4 * size})
    num_free = table.num_free_blocks()
    for num_left in (3, 2, 1, 0):
        assert table.evict_token_range("a", 0, size) == (0, size, 1)
        assert table.num_blocks("a") == num_left
    assert table.evict_token_range("a", 0, size) == (0, 0, 0)
    assert table.num_free_blocks() == num_free + 4

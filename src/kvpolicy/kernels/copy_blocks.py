"""Copies of whole blocks, in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def copy_blocks(caches: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks, in place, one after the other.

    Args:
        caches: one per layer, shape (num_blocks, ...), any layout inside a block.
        pairs: block ids (from, to).
    """
    for cache in caches:
        for source, destination in pairs:
            cache[destination] = cache[source]

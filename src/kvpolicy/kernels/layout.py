"""Where a KV cell lies in memory: from (block, KV head, token of the block, column) to an element of a layer's cache.

A layer's cache has the logical shape (blocks, KV heads, block_size, 2 * head_size). A cell is one KV head's entry
for one token: ``2 * head_size`` elements, K first, then V. Data is handled as raw bits, so that whatever is copied
arrives exactly as it was, NaN payloads included.
"""

from __future__ import annotations

from typing import Protocol

import torch
from attrs import field, frozen

from kvpolicy.core.checks import integer_errors, reject
from kvpolicy.core.errors import EngineContractError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@frozen(kw_only=True, eq=False)
class CellMap:
    """The addresses of one cache, in elements.

    Element ``column`` of the cell (block, head, token) is number
    ``block * block_stride + head * head_stride + offsets[token, column]`` from the first element of the cache.

    Attributes:
        block_stride: elements from a block to the next.
        head_stride: elements from a KV head to the next.
        offsets: int64, shape (block_size, 2 * head_size), on the CPU or where the layout keeps it.
    """

    block_stride: int
    head_stride: int
    offsets: torch.Tensor


class KVLayout(Protocol):
    """What moves cells and needs to know where they are."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def head_size(self) -> int:
        """Elements of K, and as many of V."""
        ...

    def read(
        self, cache: torch.Tensor, blocks: torch.Tensor, heads: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return copies of n cells, shape (n, 2 * head_size), in the cache's dtype."""
        ...

    def write(
        self,
        cache: torch.Tensor,
        blocks: torch.Tensor,
        heads: torch.Tensor,
        tokens: torch.Tensor,
        cells: torch.Tensor,
    ) -> None:
        """Set n different cells to the rows of ``cells``, shape (n, 2 * head_size), in the cache's dtype."""
        ...

    def cell_map(self, cache: torch.Tensor) -> CellMap:
        """Return the addresses of a cache."""
        ...


@frozen(kw_only=True)
class StridedLayout:
    """A cell is a row of the logical shape: NHD and HND differ by the strides of the cache alone.

    FlashAttention, FlashInfer and Triton backends store it like this.
    """

    block_size: int
    head_size: int

    def __attrs_post_init__(self) -> None:
        _check_sizes(self.block_size, self.head_size)

    def read(
        self, cache: torch.Tensor, blocks: torch.Tensor, heads: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return copies of cells.

        Args:
            cache: shape (num_blocks, num_kv_heads, block_size, 2 * head_size), any strides.
            blocks: int64, shape (n,), block ids.
            heads: int64, shape (n,), KV heads of this cache.
            tokens: int64, shape (n,), places in the block.

        Returns:
            Shape (n, 2 * head_size), the cache's dtype, K in the first half.

        Raises:
            EngineContractError: the cache has another shape.
        """
        _check_cache(cache, self.block_size, self.head_size)
        return bits_of(cache)[blocks, heads, tokens].view(cache.dtype)

    def write(
        self,
        cache: torch.Tensor,
        blocks: torch.Tensor,
        heads: torch.Tensor,
        tokens: torch.Tensor,
        cells: torch.Tensor,
    ) -> None:
        """Set cells, in place. ``cells`` is what ``read`` returns, and no cell is named twice.

        Raises:
            EngineContractError: the cache has another shape.
        """
        _check_cache(cache, self.block_size, self.head_size)
        bits_of(cache)[blocks, heads, tokens] = bits_of(cells)

    def cell_map(self, cache: torch.Tensor) -> CellMap:
        """Return the addresses of a cache; its strides say everything.

        Raises:
            EngineContractError: the cache has another shape.
        """
        _check_cache(cache, self.block_size, self.head_size)
        block_stride, head_stride, token_stride, column_stride = cache.stride()
        tokens = torch.arange(self.block_size) * token_stride
        columns = torch.arange(2 * self.head_size) * column_stride
        return CellMap(block_stride=block_stride, head_stride=head_stride, offsets=tokens[:, None] + columns)


@frozen(kw_only=True, eq=False)
class PermutedLayout:
    """Every (block, KV head) is a region of ``2 * block_size * head_size`` elements with an order of its own.

    vLLM's CPU backend stores it like this: how a region is packed depends on dtype, block size and instruction set.

    Attributes:
        offsets: int64, shape (block_size, 2 * head_size): where in its region element (token, column) lies. K is
            in the first half of the columns.

    Raises:
        EngineContractError: the offsets are not a permutation of the region.
    """

    block_size: int
    head_size: int
    offsets: torch.Tensor = field(repr=False)

    def __attrs_post_init__(self) -> None:
        _check_sizes(self.block_size, self.head_size)
        shape = (self.block_size, 2 * self.head_size)
        if self.offsets.dtype != torch.int64 or tuple(self.offsets.shape) != shape:
            got = f"{self.offsets.dtype} of {tuple(self.offsets.shape)}"
            raise EngineContractError(f"layout.offsets: expected torch.int64 of {shape}, got {got}")
        places = self.offsets.flatten().sort().values
        if not torch.equal(places, torch.arange(self._region, device=places.device)):
            num_distinct = places.unique().numel()
            got = f"{num_distinct} different ones from {int(places[0])} to {int(places[-1])}"
            raise EngineContractError(
                f"layout.offsets: expected each of 0 to {self._region - 1} once (a permutation), got {got}"
            )

    @property
    def _region(self) -> int:
        return 2 * self.block_size * self.head_size

    def read(
        self, cache: torch.Tensor, blocks: torch.Tensor, heads: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return copies of cells.

        Args:
            cache: shape (num_blocks, num_kv_heads, block_size, 2 * head_size), contiguous.
            blocks: int64, shape (n,), block ids.
            heads: int64, shape (n,), KV heads of this cache.
            tokens: int64, shape (n,), places in the block.

        Returns:
            Shape (n, 2 * head_size), the cache's dtype, K in the first half.

        Raises:
            EngineContractError: the cache has another shape, or is not contiguous.
        """
        elements = self._elements(cache, blocks, heads, tokens)
        bits = bits_of(cache).view(-1).index_select(0, elements.flatten())
        return bits.view(cache.dtype).view(elements.shape)

    def write(
        self,
        cache: torch.Tensor,
        blocks: torch.Tensor,
        heads: torch.Tensor,
        tokens: torch.Tensor,
        cells: torch.Tensor,
    ) -> None:
        """Set cells, in place. ``cells`` is what ``read`` returns, and no cell is named twice.

        Raises:
            EngineContractError: the cache has another shape, or is not contiguous.
        """
        elements = self._elements(cache, blocks, heads, tokens)
        bits_of(cache).view(-1).scatter_(0, elements.flatten(), bits_of(cells).flatten())

    def cell_map(self, cache: torch.Tensor) -> CellMap:
        """Return the addresses of a cache.

        Raises:
            EngineContractError: the cache has another shape, or is not contiguous.
        """
        self._check(cache)
        return CellMap(block_stride=cache.shape[1] * self._region, head_stride=self._region, offsets=self.offsets)

    def _elements(
        self, cache: torch.Tensor, blocks: torch.Tensor, heads: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        self._check(cache)
        # index_select and scatter_ take half the time of the same with brackets.
        regions = (blocks * cache.shape[1] + heads) * self._region
        return regions[:, None] + self.offsets.index_select(0, tokens)

    def _check(self, cache: torch.Tensor) -> None:
        _check_cache(cache, self.block_size, self.head_size)
        if not cache.is_contiguous():
            raise EngineContractError(f"cache: expected a contiguous tensor, got strides {tuple(cache.stride())}")


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers of the same width, so that no value is interpreted on its way.

    >>> bits_of(torch.tensor([1.0, float("nan")])).tolist()
    [1065353216, 2143289344]
    """
    return values.view(_BITS[values.element_size()])


def _check_sizes(block_size: int, head_size: int) -> None:
    reject(integer_errors("layout.block_size", block_size, 1) + integer_errors("layout.head_size", head_size, 1))


def _check_cache(cache: torch.Tensor, block_size: int, head_size: int) -> None:
    if cache.dim() != 4 or cache.shape[2:] != (block_size, 2 * head_size):  # noqa: PLR2004 - the four axes named above
        expected = f"(num_blocks, num_kv_heads, {block_size}, {2 * head_size})"
        raise EngineContractError(f"cache: expected the shape {expected}, got {tuple(cache.shape)}")

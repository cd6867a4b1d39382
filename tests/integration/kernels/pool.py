"""A pool of KV blocks whose cells say where they come from.

A cell holds (request or prompt, layer, KV head, logical position) as bit patterns, a different one in each column;
whatever nobody has written is NaN. So what a request reads through its block table shows whether it is its own,
where in the sequence it belongs, and whether K, V and all their elements are still together.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from attrs import define, field

from kvpolicy.core.spaces import blocks_for
from kvpolicy.kernels.layout import KVLayout, PermutedLayout, StridedLayout, bits_of

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_LAYERS, NUM_HEADS = 2, 2


def cells_of(owners: torch.Tensor, layer: int, head: int, positions: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the bits of cells, int64, shape (n, columns), the same for every dtype."""
    number = ((owners * NUM_LAYERS + layer) * NUM_HEADS + head << 16) + positions
    column = torch.arange(columns)
    half = torch.where(column % 2 == 0, number[:, None], number[:, None] >> 16) & 0xFFFF
    return half ^ column * 257


def caches_of(kind: str, dtype: torch.dtype, num_blocks: int, block_size: int, head_size: int) -> list[torch.Tensor]:
    """Return NaN-filled caches, one per layer, that are views into larger memory where the layout allows it."""
    if kind == "nhd":
        shape = (num_blocks, block_size, NUM_HEADS + 1, 2 * head_size)
        return [
            torch.full(shape, torch.nan, dtype=dtype)[:, :, :NUM_HEADS].permute(0, 2, 1, 3) for _ in range(NUM_LAYERS)
        ]
    shape = (num_blocks + 1, NUM_HEADS, block_size, 2 * head_size)
    return [torch.full(shape, torch.nan, dtype=dtype)[1:] for _ in range(NUM_LAYERS)]


def layout_of(kind: str, dtype: torch.dtype, block_size: int, head_size: int) -> KVLayout:
    """Return a layout; ``probed`` is the one of vLLM's CPU backend on this machine."""
    if kind == "probed":
        from kvpolicy.adapters.vllm.v0_28.worker.layout_probe import probe_cpu_layout

        return probe_cpu_layout(dtype=dtype, block_size=block_size, head_size=head_size)
    if kind == "permuted":
        order = torch.randperm(2 * block_size * head_size, generator=torch.Generator().manual_seed(1))
        return PermutedLayout(block_size=block_size, head_size=head_size, offsets=order.view(block_size, -1))
    return StridedLayout(block_size=block_size, head_size=head_size)


@define(kw_only=True)
class Request:
    """A request: who wrote its prompt, its table, and how many entries it holds."""

    tag: int
    prompt_tag: int
    prompt_length: int
    table: list[int]
    logical_length: int
    physical_length: int
    history: dict[tuple[int, int], list[int]] = field(factory=dict)
    """Per (layer, KV head) the logical positions by KV index."""


@define(kw_only=True)
class Pool:
    """Caches, their free blocks, and who uses the others."""

    layout: KVLayout
    caches: Sequence[torch.Tensor]
    seed: int
    free: list[int] = field(init=False)
    num_users: dict[int, int] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.free = list(range(self.caches[0].shape[0]))
        random.Random(self.seed).shuffle(self.free)

    def admit(self, tag: int, prompt_length: int, shared: Request | None = None) -> Request:
        """Return a new request with its prompt written; it shares the whole prompt blocks of another one."""
        num_shared = shared.prompt_length // self.layout.block_size if shared else 0
        table = shared.table[:num_shared] if shared else []
        for block in table:
            self.num_users[block] += 1
        request = Request(
            tag=tag,
            prompt_tag=shared.prompt_tag if shared else tag,
            prompt_length=prompt_length,
            table=list(table),
            logical_length=0,
            physical_length=0,
            history={(layer, head): [] for layer in range(NUM_LAYERS) for head in range(NUM_HEADS)},
        )
        self.append(request, prompt_length)
        return request

    def append(self, request: Request, num_tokens: int) -> None:
        """Store the next entries of a request, in all layers and KV heads."""
        start = request.logical_length
        request.logical_length += num_tokens
        request.physical_length += num_tokens
        while len(request.table) < blocks_for(request.physical_length, self.layout.block_size):
            block = self.free.pop()
            self.num_users[block] = 1
            request.table.append(block)
        positions = torch.arange(start, request.logical_length)
        first = request.physical_length - num_tokens
        for (layer, head), held in request.history.items():
            held.extend(positions.tolist())
            self._write(request, layer, head, torch.arange(first, request.physical_length), positions)

    def free_beyond(self, request: Request, length: int) -> None:
        """Shorten a request: blocks past its new end are poisoned, and free for others."""
        request.physical_length = length
        num_kept = blocks_for(length, self.layout.block_size)
        for block in request.table[num_kept:]:
            self.num_users[block] -= 1
            assert self.num_users[block] == 0
            self.free.append(block)
            for cache in self.caches:
                cache[block] = torch.nan
        del request.table[num_kept:]
        random.Random(self.seed).shuffle(self.free)

    def all_cells(self, layer: int) -> torch.Tensor:
        """Return copies of all cells of a layer, as bits, shape (blocks, heads, block_size, columns)."""
        shape = (*self.caches[layer].shape[:2], self.layout.block_size)
        where = torch.cartesian_prod(*(torch.arange(size) for size in shape)).T
        return bits_of(self.layout.read(self.caches[layer], *where)).view(*shape, -1)

    def read(self, request: Request, layer: int, head: int) -> torch.Tensor:
        """Return what a request reads through its table, as bits, shape (physical_length, columns)."""
        blocks, tokens = self._places(request, torch.arange(request.physical_length))
        return bits_of(self.layout.read(self.caches[layer], blocks, torch.full_like(blocks, head), tokens))

    def expected(self, request: Request, layer: int, head: int, positions: torch.Tensor) -> torch.Tensor:
        """Return the bits of a request's entries at logical positions, shape (n, columns)."""
        owners = torch.where(positions < request.prompt_length, request.prompt_tag, request.tag)
        cells = cells_of(owners, layer, head, positions, 2 * self.layout.head_size)
        return cells.to(bits_of(self.caches[0]).dtype)

    def _write(self, request: Request, layer: int, head: int, cells: torch.Tensor, positions: torch.Tensor) -> None:
        blocks, tokens = self._places(request, cells)
        values = self.expected(request, layer, head, positions).view(self.caches[layer].dtype)
        self.layout.write(self.caches[layer], blocks, torch.full_like(blocks, head), tokens, values)

    def _places(self, request: Request, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.tensor(request.table, dtype=torch.int64)[cells // self.layout.block_size]
        return blocks, cells % self.layout.block_size

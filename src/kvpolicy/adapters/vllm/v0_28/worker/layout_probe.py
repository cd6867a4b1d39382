"""How vLLM's CPU backend packs a block, found out by writing known values through its own cache-write op.

The packing depends on dtype, block size, head size and instruction set, and no public name describes it. So nothing
is assumed but what ``CPUAttentionBackendImpl.do_kv_cache_update`` does with a cache before it calls the op: K and V
are halves of each (block, KV head) region. The probe has a small cache of its own; no engine needs to be running.
"""

from __future__ import annotations

import torch
from attrs import field, frozen
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from kvpolicy.core.errors import EngineContractError
from kvpolicy.kernels.layout import PermutedLayout, bits_of

_NUM_BLOCKS, _NUM_HEADS = 3, 2
# Digits up to 15 are exact in every floating-point format of a cache that has at least four bits of mantissa.
_DIGIT_BITS = 4
_CACHE_DTYPE = "auto"
_SEED = 0


@frozen(kw_only=True)
class _Packing:
    """All that the packing depends on, and a scratch cache that is packed so."""

    dtype: torch.dtype
    block_size: int
    head_size: int
    isa: str
    cache: torch.Tensor = field(repr=False)

    @property
    def region(self) -> int:
        """Elements of one KV head in one block."""
        return 2 * self.block_size * self.head_size

    def write(self, slots: torch.Tensor, cells: torch.Tensor) -> None:
        """Have the engine write cells, shape (n, heads, 2 * head_size), to slots, int64, shape (n,)."""
        key, value = (half.contiguous() for half in cells.chunk(2, dim=-1))
        halves = self.cache.view(_NUM_BLOCKS, _NUM_HEADS, 2 * self.block_size, self.head_size).chunk(2, dim=2)
        try:
            ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, self.isa, kv_cache_dtype=_CACHE_DTYPE)
        except (RuntimeError, NotImplementedError) as error:
            raise self.error(f"the engine's cache-write op refused: {error}") from error

    def error(self, what: str) -> EngineContractError:
        """Return an error that says which packing it is about."""
        return EngineContractError(
            f"KV-cache packing of the CPU backend (dtype {self.dtype}, block size {self.block_size}, head size "
            f"{self.head_size}, isa {self.isa!r}): {what}"
        )


def probe_cpu_layout(*, dtype: torch.dtype, block_size: int, head_size: int, isa: str | None = None) -> PermutedLayout:
    """Return the layout of the CPU backend's KV caches, derived and verified on scratch memory.

    Args:
        dtype: of model and cache (``cache_dtype="auto"``); quantised caches are another matter.
        block_size: tokens per block, as the backend sees it.
        head_size: elements of K per KV head.
        isa: the packing's name; unless given, the one that the backend chooses here.

    Raises:
        EngineContractError: the op refuses, or what it wrote is not a permutation of what it was given.
    """
    shape = CPUAttentionBackend.get_kv_cache_shape(_NUM_BLOCKS, block_size, _NUM_HEADS, head_size, _CACHE_DTYPE)
    packing = _Packing(
        dtype=dtype,
        block_size=block_size,
        head_size=head_size,
        isa=isa or _get_attn_isa(dtype, block_size, head_size, _CACHE_DTYPE),
        cache=torch.full((_NUM_BLOCKS, _NUM_HEADS, block_size, 2 * head_size), torch.nan, dtype=dtype),
    )
    if tuple(shape) != tuple(packing.cache.shape):
        raise packing.error(f"expected a cache of shape {tuple(packing.cache.shape)}, got {tuple(shape)}")
    layout = _derived(packing)
    _verify(packing, layout)
    return layout


def _derived(packing: _Packing) -> PermutedLayout:
    """Return the layout that follows from writing every element's own number into block 1, digit by digit."""
    numbers = torch.arange(packing.region).view(packing.block_size, 1, -1).expand(-1, _NUM_HEADS, -1)
    slots = torch.arange(packing.block_size) + packing.block_size
    found = torch.zeros(_NUM_HEADS, packing.region, dtype=torch.int64)
    for shift in range(0, (packing.region - 1).bit_length(), _DIGIT_BITS):
        packing.cache.fill_(torch.nan)
        packing.write(slots, ((numbers >> shift) % (1 << _DIGIT_BITS)).to(packing.dtype))
        written = packing.cache[1].view(_NUM_HEADS, -1).double()
        # Also false for NaN, which is where nothing was written.
        if not bool(((written >= 0) & (written < 1 << _DIGIT_BITS) & (written == written.trunc())).all()):
            raise packing.error("expected to read the digits written, got other values")
        if not bool(packing.cache[::2].isnan().all()):
            raise packing.error("expected one block to be written, got another one changed")
        found += written.long() << shift
    if not torch.equal(found[0], found[1]):
        raise packing.error("expected the same order in every KV head, got two")
    offsets = torch.argsort(found[0])
    if not torch.equal(found[0][offsets], torch.arange(packing.region)):
        num_distinct = found[0].unique().numel()
        raise packing.error(f"expected a permutation of {packing.region} elements, got {num_distinct} distinct ones")
    return PermutedLayout(
        block_size=packing.block_size, head_size=packing.head_size, offsets=offsets.view(packing.block_size, -1)
    )


def _verify(packing: _Packing, layout: PermutedLayout) -> None:
    """Compare with the engine after every write of random cells: single ones in random slots, as decoding does."""
    generator = torch.Generator().manual_seed(_SEED)
    num_slots = _NUM_BLOCKS * packing.block_size
    packing.cache.fill_(torch.nan)
    expected = packing.cache.clone()
    slots = torch.randperm(num_slots, generator=generator)
    heads = torch.arange(_NUM_HEADS)
    # Then everything again at once, as a prefill does.
    for some in (*slots.split(1), slots.flip(0)):
        cells = torch.randn(some.numel(), _NUM_HEADS, 2 * packing.head_size, generator=generator).to(packing.dtype)
        packing.write(some, cells)
        blocks, tokens = (
            part.repeat_interleave(_NUM_HEADS) for part in (some // packing.block_size, some % packing.block_size)
        )
        layout.write(expected, blocks, heads.repeat(some.numel()), tokens, cells.flatten(0, 1))
        if not torch.equal(bits_of(packing.cache), bits_of(expected)):
            raise packing.error("expected random cells where the derived order puts them, got them elsewhere")

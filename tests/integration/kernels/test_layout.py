"""Layouts: where a cell lies, that bits survive, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.core.errors import EngineContractError, PolicyUsageError
from kvpolicy.kernels.layout import PermutedLayout, StridedLayout, bits_of
from tests.integration.kernels.pool import caches_of, layout_of

KINDS = ("nhd", "hnd", "permuted")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_cells_are_written_where_the_map_says_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    """NaN payloads, infinities and signed zeros come back as they were."""
    layout = layout_of(kind, dtype, 4, 3)
    cache = caches_of(kind, dtype, 5, 4, 3)[0]
    where = torch.tensor([[1, 0, 2], [1, 1, 0], [4, 0, 3]])
    cells = bits_of(torch.empty(3, 6, dtype=dtype)).random_(-(2**15), 2**15).view(dtype)
    bits_of(cells)[0] = bits_of(torch.tensor([torch.nan, -torch.nan, torch.inf, -0.0, 0.0, -torch.inf], dtype=dtype))
    bits_of(cells)[1, :2] = bits_of(torch.tensor([torch.nan], dtype=dtype))[0] + torch.tensor([1, 2])
    blocks, heads, tokens = where.T
    layout.write(cache, blocks, heads, tokens, cells)
    assert torch.equal(bits_of(layout.read(cache, blocks, heads, tokens)), bits_of(cells))
    cell_map = layout.cell_map(cache)
    flat = bits_of(torch.empty(0, dtype=dtype).set_(cache.untyped_storage()))
    for (block, head, token), cell in zip(where.tolist(), bits_of(cells), strict=True):
        base = cache.storage_offset() + block * cell_map.block_stride + head * cell_map.head_stride
        assert torch.equal(flat[base + cell_map.offsets[token]], cell)
        if kind != "permuted":
            assert torch.equal(bits_of(cache)[block, head, token], cell)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_another_shape_is_refused(kind: str) -> None:
    layout = layout_of(kind, torch.float32, 4, 3)
    zero = torch.zeros(1, dtype=torch.int64)
    for cache in (torch.zeros(5, 2, 4, 3), torch.zeros(5, 2, 6, 4), torch.zeros(2, 4, 6)):
        for call in (
            lambda cache=cache: layout.cell_map(cache),
            lambda cache=cache: layout.read(cache, zero, zero, zero),
            lambda cache=cache: layout.write(cache, zero, zero, zero, torch.zeros(1, 6)),
        ):
            with pytest.raises(
                EngineContractError, match=r"cache: expected the shape \(num_blocks, num_kv_heads, 4, 6\)"
            ):
                call()


def test_regions_need_contiguous_memory() -> None:
    layout = layout_of("permuted", torch.float32, 4, 3)
    with pytest.raises(EngineContractError, match="expected a contiguous tensor"):
        layout.cell_map(torch.zeros(5, 4, 2, 6).transpose(1, 2))


def test_offsets_must_be_a_permutation() -> None:
    order = torch.arange(8)
    PermutedLayout(block_size=2, head_size=2, offsets=order.flip(0).view(2, 4))
    twice, outside = order.clone(), order.clone()
    twice[0] = 1
    outside[0] = 8
    for wrong, got in ((twice, "7 different ones from 1 to 7"), (outside, "8 different ones from 1 to 8")):
        with pytest.raises(EngineContractError, match=rf"expected each of 0 to 7 once \(a permutation\), got {got}"):
            PermutedLayout(block_size=2, head_size=2, offsets=wrong.view(2, 4))
    with pytest.raises(EngineContractError, match=r"expected torch\.int64 of \(2, 4\), got torch\.int64 of \(8,\)"):
        PermutedLayout(block_size=2, head_size=2, offsets=order)
    with pytest.raises(EngineContractError, match=r"got torch\.int32"):
        PermutedLayout(block_size=2, head_size=2, offsets=order.int().view(2, 4))


def test_sizes_are_positive() -> None:
    with pytest.raises(PolicyUsageError) as caught:
        StridedLayout(block_size=0, head_size=-1)
    assert len(caught.value.reasons) == 2

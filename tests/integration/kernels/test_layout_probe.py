"""The probe of the CPU backend's packing: what it finds is what the engine writes, and wrong engines are noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvpolicy.core.errors import EngineContractError
from kvpolicy.kernels.layout import bits_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("vllm", reason="the probe asks vLLM's CPU backend")

from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvpolicy.adapters.vllm.v0_28.worker.layout_probe import probe_cpu_layout


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_the_engine_writes_is_read_through_the_layout(dtype: torch.dtype, block_size: int) -> None:
    """An independent look: other numbers of blocks and heads than the probe has."""
    num_blocks, num_heads, head_size = 5, 3, 80
    layout = probe_cpu_layout(dtype=dtype, block_size=block_size, head_size=head_size)
    cache = torch.zeros(num_blocks, num_heads, block_size, 2 * head_size, dtype=dtype)
    halves = cache.view(num_blocks, num_heads, 2 * block_size, head_size).chunk(2, dim=2)
    slots = torch.randperm(num_blocks * block_size)[: 2 * block_size]
    key, value = torch.randn(2, len(slots), num_heads, head_size).to(dtype)
    isa = _get_attn_isa(dtype, block_size, head_size, "auto")
    ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)
    for head in range(num_heads):
        cells = layout.read(cache, slots // block_size, torch.full_like(slots, head), slots % block_size)
        assert torch.equal(bits_of(cells), bits_of(torch.cat([key[:, head], value[:, head]], dim=-1)))


def fake_write(kind: str) -> Callable[..., None]:
    """Return a cache-write op that stores a row-major region, except for one mistake."""

    def write(key: Any, value: Any, keys: Any, values: Any, slots: Any, isa: str, **_: Any) -> None:  # noqa: PLR0917 - the op's own
        if kind == "refuses":
            message = f"no {isa} here"
            raise RuntimeError(message)
        block_size = keys.shape[2]
        for t, slot in enumerate(slots.tolist()):
            block, token = divmod(slot, block_size)
            if kind == "other block":
                block = (block + 1) % 3
            keys[block, :, token] = key[t]
            if kind == "loses a value" and token == 0:
                continue
            values[block, :, token] = value[t] if kind != "keys only" else key[t]
            if kind == "spills" and len(slots) == 1:
                values[block, :, (token + 1) % block_size] = 0.0
            if kind == "heads differ":
                keys[block, 1, token] = key[t, 1].flip(0)
            if kind == "rounds":
                keys[block, :, token] += 0.5

    return write


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("refuses", "the engine's cache-write op refused: no vec"),
        ("other block", "expected to read the digits written"),
        ("loses a value", "expected to read the digits written"),
        ("rounds", "expected to read the digits written"),
        ("keys only", "expected a permutation of 512 elements, got 256 distinct ones"),
        ("spills", "expected random cells where the derived order puts them"),
        ("heads differ", "expected the same order in every KV head"),
    ],
)
def test_an_engine_that_does_something_else_is_refused(
    kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", fake_write(kind))
    with pytest.raises(EngineContractError, match=message) as caught:
        probe_cpu_layout(dtype=torch.float32, block_size=16, head_size=16)
    assert "(dtype torch.float32, block size 16, head size 16, isa 'vec" in str(caught.value)


def test_the_fake_without_a_mistake_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is the mistakes that are noticed."""
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", fake_write(""))
    layout = probe_cpu_layout(dtype=torch.float32, block_size=16, head_size=16, isa="vec16")
    assert layout.offsets[1, :2].tolist() == [16, 17]
    assert layout.offsets[0, 16] == 256

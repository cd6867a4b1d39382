"""What a worker needs before it can compact: how its KV caches are laid out, and which KV heads they hold."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from kvpolicy.adapters.vllm.shared.compactor import Compactor
from kvpolicy.adapters.vllm.shared.refusals import refuse
from kvpolicy.adapters.vllm.v0_28.startup.guards import POLICIES
from kvpolicy.adapters.vllm.v0_28.startup.model_guards import layer_errors
from kvpolicy.core.errors import EngineContractError
from kvpolicy.kernels.expand.spec import HeadGrid
from kvpolicy.kernels.layout import StridedLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpolicy.kernels.layout import KVLayout


def make_compactor(
    caches: Sequence[torch.Tensor], kv_cache_config: KVCacheConfig, vllm_config: VllmConfig
) -> Compactor:
    """Return the compactor of one worker, warmed up.

    Args:
        caches: the runner's, by layer.
        kv_cache_config: of this worker.
        vllm_config: of the engine.

    Raises:
        PolicyUsageError: the model's layers ask for other caches than those of full attention.
        EngineContractError: the caches are not laid out as any layout that kvpolicy knows, or layers share one, which
            an event would compact once for each.
    """
    # Before the scheduler asks: it is made when the caches are there.
    if reasons := layer_errors(vllm_config, kv_cache_config, POLICIES):
        refuse(reasons)
    if len({cache.data_ptr() for cache in caches}) < len(caches):
        raise EngineContractError("KV cache: expected a tensor of its own for every layer, got one that layers share")
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    expected = (spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
    if any(tuple(cache.shape[1:]) != expected for cache in caches):
        shapes = sorted({tuple(cache.shape) for cache in caches})
        raise EngineContractError(f"KV cache: expected (blocks, *{expected}) in every layer, got shapes {shapes}")
    total = vllm_config.model_config.get_total_num_kv_heads()
    rank, num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    compactor = Compactor(
        caches=tuple(caches),
        layout=_layout(caches[0], spec.block_size, spec.head_size),
        # Where there are fewer KV heads than ranks, neighbouring ranks hold copies of the same one.
        grid=HeadGrid(num_layers=len(caches), num_kv_heads=spec.num_kv_heads, first_kv_head=rank * total // num_ranks),
        block_size=spec.block_size,
        is_compiled=caches[0].device.type == "cpu" and find_spec("numba") is not None,
    )
    compactor.warm_up()
    return compactor


def _layout(cache: torch.Tensor, block_size: int, head_size: int) -> KVLayout:
    if cache.device.type != "cpu":
        return StridedLayout(block_size=block_size, head_size=head_size)
    from kvpolicy.adapters.vllm.v0_28.worker.layout_probe import probe_cpu_layout

    return probe_cpu_layout(dtype=cache.dtype, block_size=block_size, head_size=head_size)

"""A KV-cache group whose requests hold fewer entries than they have tokens: the spec, and its block manager."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvpolicy.adapters.vllm.shared.options import EngineOptions
from kvpolicy.core.spaces import blocks_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(frozen=True, kw_only=True)
class BoundedAttentionSpec(FullAttentionSpec):
    """Full attention over at most as many entries as the engine's policy keeps.

    It has no fields of its own, because the engine merges the specs of all layers field by field.
    """

    @classmethod
    def bounding(cls, spec: FullAttentionSpec) -> BoundedAttentionSpec:
        """Return the bounded form of a layer's spec."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(spec)})

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes that one request can hold in one layer, for the engine's start-up check of the pool.

        Of a request with the shortest prompt: where a policy's bound depends on the prompt, admission says the rest.
        """
        dense = super().max_memory_usage_bytes(vllm_config)
        policy = EngineOptions.from_config(vllm_config).kv_cache_policy
        if policy is None:
            return int(dense)
        peak = policy.schedule(1, block_size=self.block_size).peak
        return min(int(dense), blocks_for(peak, self.block_size) * int(self.page_size_bytes))


class Footprints(Protocol):
    """What the block manager asks about requests. Every request without a policy is a dense one."""

    def kv_shift(self, request_id: str) -> int:
        """Return the entries dropped per KV head so far; 0 for a dense request."""
        ...

    def bound(self, request_id: str) -> int | None:
        """Return the most entries that the request will ever hold; None for a dense request."""
        ...

    def prompt_length(self, request_id: str) -> int | None:
        """Return the tokens whose blocks may be published in the prefix cache; None for a dense request."""
        ...


class _AllDense:
    def kv_shift(self, request_id: str) -> int:  # noqa: ARG002 - the protocol's
        return 0

    def bound(self, request_id: str) -> int | None:  # noqa: ARG002 - the protocol's
        return None

    prompt_length = bound


class BoundedAttentionManager(FullAttentionManager):
    """The stock block manager, counting the entries that are held instead of the tokens that were computed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the stock manager; the scheduler sets ``footprints`` when it is built itself."""
        super().__init__(*args, **kwargs)
        self.footprints: Footprints = _AllDense()

    def get_num_blocks_to_allocate(  # noqa: PLR0913, PLR0917 - stock signature
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,  # noqa: FBT001, FBT002 - stock signature
    ) -> int:
        """Return the blocks that ``num_tokens`` tokens need; at admission, those that must be free to admit a request.

        Admission is a reservation: the request's whole bound, and what the admitted ones may still grow. So bounded
        requests never take blocks from each other later, which is what preemption would be.
        """
        num_entries = num_tokens - self.footprints.kv_shift(request_id)
        if apply_admission_cap:
            num_entries = self.footprints.bound(request_id) or num_entries
        needed = super().get_num_blocks_to_allocate(
            request_id,
            num_entries,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
        )
        return int(needed) + (self.reserved_growth(request_id) if apply_admission_cap else 0)

    def reserved_growth(self, request_id: str) -> int:
        """Return the blocks that the admitted bounded requests, but for this one, may still ask for."""
        growth = 0
        for other, blocks in self.req_to_blocks.items():
            bound = self.footprints.bound(other)
            if bound is not None and other != request_id and blocks:
                growth += max(0, blocks_for(bound, self.block_size) - len(blocks))
        return growth

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Append blocks until the entries of ``num_tokens`` tokens fit; return the new ones."""
        num_entries = num_tokens - self.footprints.kv_shift(request_id)
        new_blocks: list[KVCacheBlock] = super().allocate_new_blocks(request_id, num_entries, num_tokens_main_model)
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int, retention_interval: int | None = None) -> None:
        """Publish full blocks in the prefix cache: of a bounded request those of its prompt, which never change."""
        prompt_length = self.footprints.prompt_length(request.request_id)
        publishable = num_tokens if prompt_length is None else min(num_tokens, prompt_length)
        super().cache_blocks(request, publishable, retention_interval=retention_interval)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:  # noqa: ARG002 - stock signature
        """Return 0: cascade attention, which would share them, is refused."""
        return 0


def register_bounded_spec(vllm_config: VllmConfig) -> None:
    """Tell the engine of this process which manager the spec has.

    The engine's own specs come first: its registry takes a registry that is not empty for a complete one.
    """
    register_all_kvcache_specs(vllm_config)
    KVCacheSpecRegistry.register(
        BoundedAttentionSpec, manager_class=BoundedAttentionManager, uniform_type_base_spec=FullAttentionSpec
    )

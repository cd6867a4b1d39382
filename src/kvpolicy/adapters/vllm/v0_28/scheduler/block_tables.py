"""Block tables of requests: the one module that reads and edits them, as private state of vLLM's KV-cache manager.

Every name used is listed in ``surface.py``. Nothing here decides anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.adapters.vllm.v0_28.scheduler.request_tokens import require_settled
from kvpolicy.adapters.vllm.v0_28.startup.kv_spec import BoundedAttentionManager
from kvpolicy.core.errors import CapacityError, EngineContractError
from kvpolicy.core.spaces import TokenRange, align_inward

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

    from kvpolicy.adapters.vllm.v0_28.startup.kv_spec import Footprints

# A count of cached blocks that no table reaches: the manager's cache_blocks() then has nothing to publish, and its fast
# path for known requests stays. free() removes it with the rest of the request's state.
_WITHHELD = 1 << 30


class EngineBlocks:
    """Block tables of the engine's single KV-cache group: the eviction primitive (R.1-R.3), and the edits of an event.

    A caller must have no step in flight for the request it edits: blocks return to the pool at once and the pool reuses
    the last one freed first.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        """Wrap a KV-cache manager.

        Raises:
            EngineContractError: the model has not exactly one KV-cache group.
        """
        tables = manager.coordinator.single_type_managers
        if len(tables) != 1:
            message = f"kv_cache_config.kv_cache_groups: expected exactly 1 group, got {len(tables)}"
            raise EngineContractError(message)
        self._manager = manager
        self._table = tables[0]
        self._pool = manager.block_pool

    def use_footprints(self, footprints: Footprints) -> None:
        """Let the block manager count what requests hold.

        Raises:
            EngineContractError: it is not the one that ``kv_spec`` registers.
        """
        if not isinstance(self._table, BoundedAttentionManager):
            message = f"block manager: expected {BoundedAttentionManager.__name__}, got {type(self._table).__name__}"
            raise EngineContractError(message)
        self._table.footprints = footprints

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        return int(self._table.block_size)

    @property
    def num_pool_blocks(self) -> int:
        """Blocks that requests can use (the null block is not one of them)."""
        return int(self._pool.num_gpu_blocks) - 1

    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, those still in the prefix cache included."""
        return int(self._pool.get_num_free_blocks())

    def num_blocks(self, request_id: str) -> int:
        """Blocks in this request's table; 0 for an unknown request."""
        return len(self._table.req_to_blocks.get(request_id, ()))

    @staticmethod
    def num_shared(hit: KVCacheBlocks) -> int:
        """Blocks of a prefix-cache hit that requests hold; the others are among the free ones."""
        return sum(block.ref_cnt > 0 for block in hit.blocks[0])

    def num_watermark_blocks(self) -> int:
        """Blocks that the engine keeps free when it admits a waiting request."""
        return int(self._manager.watermark_blocks)

    def evict_blocks_for_request(self, request_id: str, block_ids: Iterable[int]) -> int:
        """Take blocks out of a live request's table; return how many were really reclaimed.

        The table is compacted, the blocks leave the prefix-cache index, and go back to the pool. A block that another
        request shares leaves this table and the index, is not counted, and stays with the sharer. Ids that are not in
        the table (and the null block) are ignored, repeats too; an unknown request gives 0.
        """
        table = self._table.req_to_blocks.get(request_id, ())
        wanted = set(block_ids)
        return self._remove(
            request_id, [i for i, block in enumerate(table) if block.block_id in wanted and not block.is_null]
        )

    def evict_token_range(self, request_id: str, start: int, end: int) -> tuple[int, int, int]:
        """Evict the whole blocks inside ``[start, end)``; return ``(aligned_start, aligned_end, num_freed)``.

        Rounded inward: with 16-token blocks, [0, 30) gives (0, 16, 1). The caller removes exactly the returned token
        range from every per-token array. An empty, inverted or sub-block range, or an unknown request, gives
        ``(start, start, 0)`` and changes nothing. Null blocks leave the table with their range but are never freed.
        """
        table = self._table.req_to_blocks.get(request_id, ())
        stop = min(end, len(table) * self.block_size)
        if start < 0 or stop <= start:
            return start, start, 0
        span = align_inward(TokenRange(start, stop), self.block_size)
        if span.is_empty:
            return start, start, 0
        num_freed = self._remove(request_id, range(span.first, span.last))
        return span.tokens.start, span.tokens.end, num_freed

    def withhold(self, request_id: str) -> None:
        """Publish no further block of this request in the prefix cache, until its blocks are released."""
        if self._manager.enable_caching:
            self._table.num_cached_block[request_id] = _WITHHELD

    def keep_only(self, request_id: str, ordinals: Sequence[int]) -> int:
        """Take all blocks out of a live request's table but those at ``ordinals``; return how many were reclaimed."""
        kept = set(ordinals)
        return self._remove(request_id, [i for i in range(self.num_blocks(request_id)) if i not in kept])

    def own_range(self, request_id: str, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Make the table's blocks ``[first, last)`` this request's alone, so that they can be written to.

        A shared block is replaced by a new one; the ids (shared, new) are returned, and whoever carries the step out
        copies the one to the other before anything else. A published block that nobody else holds only leaves the
        prefix-cache index.

        Raises:
            CapacityError: the pool has no block for the copy.
        """
        table = self._table.req_to_blocks[request_id]
        copies = []
        for i in range(first, min(last, len(table))):
            block = table[i]
            if block.ref_cnt > 1:
                if not self.num_free_blocks():
                    raise CapacityError(f"request {request_id}: no free block for a private copy of a shared one")
                table[i] = self._pool.get_new_blocks(1)[0]
                self._pool.free_blocks([block])
                copies.append((int(block.block_id), int(table[i].block_id)))
            elif block.block_hash is not None:
                self._pool.evict_blocks({block.block_id})
        return tuple(copies)

    def release(self, request: Request) -> None:
        """Give back every block of a request that keeps living; its tokens must then be computed again."""
        require_settled(request)
        self._manager.free(request)
        request.num_computed_tokens = 0

    def _remove(self, request_id: str, ordinals: Sequence[int]) -> int:
        """Remove the table entries at ``ordinals`` and free those that are real blocks."""
        if not ordinals:
            return 0
        table = self._table.req_to_blocks[request_id]
        gone = set(ordinals)
        victims = [table[i] for i in ordinals if not table[i].is_null]
        num_reclaimed = sum(bool(block.ref_cnt == 1) for block in victims)
        table[:] = [block for i, block in enumerate(table) if i not in gone]
        num_cached = self._table.num_cached_block.get(request_id)
        if num_cached is not None and num_cached != _WITHHELD:
            self._table.num_cached_block[request_id] = num_cached - sum(i < num_cached for i in gone)
        # Out of the index first: the pool queues blocks without a hash for immediate reuse.
        self._pool.evict_blocks({block.block_id for block in victims})
        self._pool.free_blocks(reversed(victims))
        return num_reclaimed

"""The one module that reads and edits private state of vLLM's scheduler objects.

Two things live there: the block table of a request (``EngineBlocks``) and a request's per-token arrays (the functions
below it). Every name used is listed in ``surface.py``. Nothing here decides anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import StreamingUpdate

from kvpolicy.adapters.vllm.v0_28.kv_spec import BoundedAttentionManager
from kvpolicy.core.errors import CapacityError, EngineContractError, InvariantError
from kvpolicy.core.spaces import TokenRange, align_inward

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

    from kvpolicy.adapters.vllm.v0_28.kv_spec import Footprints

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
        _require_settled(request)
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


def _require_settled(request: Request) -> None:
    """Refuse to edit a request that a step in flight may still read or write (R.3)."""
    if request.num_in_flight_tokens:
        message = (
            f"request {request.request_id}: expected no tokens in flight before its blocks or tokens are edited, "
            f"got {request.num_in_flight_tokens}"
        )
        raise InvariantError(message)


def make_private(request: Request, salt: str) -> None:
    """Give a request its own prefix-cache salt and hash its blocks anew under it."""
    request.cache_salt = salt
    _rehash(request, 0)


def chunk_of(message: Request) -> StreamingUpdate | None:
    """Return a session's message as a chunk that keeps its grammar; None for an end of input."""
    update = StreamingUpdate.from_request(message)
    if update is not None:
        update.structured_output_request = message.structured_output_request
    return update


def drop_tail(request: Request, keep: int, block_size: int) -> None:
    """Cut a request's tokens to the first ``keep``; its reply becomes part of its prompt, and its grammar is over.

    The dropped token may have completed a block whose hash is already in the chain: hashes are cut with it.
    """
    _require_settled(request)
    request.structured_output_request = None
    del request._all_token_ids[keep:]
    _seal(request)
    _rehash(request, keep // block_size)


def cut_range(request: Request, freed: TokenRange, block_size: int) -> None:
    """Remove one block-aligned token range from every per-token array of a request."""
    _require_settled(request)
    del request._all_token_ids[freed.start : freed.end]
    if request.num_computed_tokens:
        request.num_computed_tokens -= freed.width
    _seal(request)
    _rehash(request, freed.start // block_size)


def append_chunk(request: Request, update: StreamingUpdate) -> None:
    """Append a chunk's tokens and take over the chunk's own parameters.

    Unlike the stock fold it refreshes ``max_tokens`` and the grammar, clears the stop reason and starts new prefill
    statistics.
    """
    _require_settled(request)
    request._all_token_ids.extend(update.prompt_token_ids or ())
    _seal(request)
    request.update_block_hashes()
    request.sampling_params = update.sampling_params
    request.max_tokens = update.max_tokens
    request.structured_output_request = update.structured_output_request
    request.arrival_time = update.arrival_time
    request.stop_reason = None
    # Statistics of a prefill are kept for the first try only: that count, too, begins anew with a chunk.
    request.num_preemptions = 0
    stats = PrefillStats()
    stats.set(
        num_prompt_tokens=request.num_prompt_tokens,
        num_local_cached_tokens=request.num_computed_tokens,
        num_external_cached_tokens=0,
    )
    request.prefill_stats = stats


def _seal(request: Request) -> None:
    """Make all tokens of a request its prompt.

    A new list for the prompt: workers in the same process may hold the old one. ``_all_token_ids`` is edited in place
    because the request's read-only view is bound to that list object.
    """
    request._output_token_ids.clear()
    request.prompt_token_ids = list(request._all_token_ids)
    request.num_prompt_tokens = len(request.prompt_token_ids)


def _rehash(request: Request, first_block: int) -> None:
    """Recompute the block hashes from ``first_block`` on."""
    del request.block_hashes[first_block:]
    request.update_block_hashes()

"""R.1-R.3 on the real KV-cache manager and block pool; no model is needed for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvpolicy.adapters.vllm.v0_28.scheduler.block_tables import _WITHHELD, EngineBlocks
from kvpolicy.adapters.vllm.v0_28.scheduler.request_tokens import cut_range
from kvpolicy.core.errors import EngineContractError, InvariantError
from kvpolicy.core.spaces import TokenRange
from tests.fakes.contracts import check_block_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BLOCK = 16
NUM_BLOCKS = 41  # one of them is the null block


def make_manager(num_groups: int = 1) -> KVCacheManager:
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i in range(num_groups)]
    config = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config, max_model_len=1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
    )


def make_request(request_id: str, tokens: Sequence[int]) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


class World:
    """A manager with its invariant: free + held = total after everything."""

    def __init__(self) -> None:
        self.manager = make_manager()
        self.blocks = EngineBlocks(self.manager)
        self.requests: dict[str, Request] = {}

    def run(self, request_id: str, tokens: Sequence[int]) -> Request:
        """Admit a request and compute all its tokens."""
        request = self.requests[request_id] = make_request(request_id, tokens)
        hits, num_hits, _ = self.manager.get_computed_blocks(request)
        got = self.manager.allocate_slots(request, len(tokens) - num_hits, num_hits, hits)
        assert got is not None
        request.num_computed_tokens = len(tokens)
        return request

    def table(self, request_id: str) -> list[int]:
        return list(self.manager.get_block_ids(request_id)[0])

    def block(self, block_id: int) -> Any:
        return self.manager.block_pool.blocks[block_id]

    def num_hits(self, tokens: Sequence[int]) -> int:
        return int(self.manager.get_computed_blocks(make_request("probe", tokens))[1])

    def is_withheld(self, request_id: str) -> bool:
        return bool(self.blocks._table.num_cached_block.get(request_id) == _WITHHELD)

    def num_cached_blocks(self, request_id: str) -> int:
        """Leading blocks of this request that the manager counts as published (0 while withheld)."""
        count = self.blocks._table.num_cached_block.get(request_id, 0)
        return 0 if count == _WITHHELD else int(count)

    def check(self) -> None:
        held = {block_id for request_id in self.requests for block_id in self.table(request_id)}
        assert self.blocks.num_free_blocks() + len(held) == self.blocks.num_pool_blocks == NUM_BLOCKS - 1
        for request_id in self.requests:
            assert self.num_cached_blocks(request_id) <= len(self.table(request_id))


@pytest.fixture
def world() -> World:
    return World()


TOKENS = list(range(100, 100 + 6 * BLOCK + 5))


def test_the_table_keeps_its_contract() -> None:
    def make(requests: Mapping[str, int]) -> EngineBlocks:
        world = World()
        for ordinal, (request_id, num_tokens) in enumerate(requests.items()):
            world.run(request_id, range(1000 * ordinal, 1000 * ordinal + num_tokens))
        return world.blocks

    check_block_table(make, block_size=BLOCK)


def test_a_subset_is_freed_and_the_table_compacted(world: World) -> None:
    world.run("a", TOKENS)
    table = world.table("a")
    assert world.blocks.evict_blocks_for_request("a", [table[2], table[4]]) == 2
    assert world.table("a") == [table[0], table[1], table[3], table[5], table[6]]
    assert world.num_cached_blocks("a") == 4  # of the six published ones, two went
    world.check()


def test_repeated_and_unknown_ids_are_ignored(world: World) -> None:
    world.run("a", TOKENS)
    world.run("b", [7] * 40)
    table, other = world.table("a"), world.table("b")
    assert world.blocks.evict_blocks_for_request("a", [table[1], table[1], other[0], 0, 9999]) == 1
    assert world.table("a") == [table[0], *table[2:]]
    assert world.table("b") == other
    world.check()


@pytest.mark.parametrize("ids", [[], [0], [9999]])
def test_nothing_to_evict_changes_nothing(world: World, ids: list[int]) -> None:
    world.run("a", TOKENS)
    before = world.table("a"), world.blocks.num_free_blocks(), world.num_cached_blocks("a")
    assert world.blocks.evict_blocks_for_request("a", ids) == 0
    assert world.blocks.evict_blocks_for_request("unknown", world.table("a")) == 0
    assert (world.table("a"), world.blocks.num_free_blocks(), world.num_cached_blocks("a")) == before
    assert world.blocks.num_blocks("unknown") == 0  # asking about it does not create it
    world.check()


def test_an_evicted_block_is_never_found_by_its_hash_again(world: World) -> None:
    world.run("a", TOKENS)
    assert world.num_hits(TOKENS) == 6 * BLOCK
    block_id = world.table("a")[3]
    assert world.block(block_id).block_hash is not None
    world.blocks.evict_blocks_for_request("a", [block_id])
    assert world.block(block_id).block_hash is None
    assert world.num_hits(TOKENS) == 3 * BLOCK
    world.check()


def test_a_shared_block_leaves_this_table_only_and_is_not_counted(world: World) -> None:
    world.run("a", TOKENS)
    world.run("b", [*TOKENS[: 4 * BLOCK], *range(500, 530)])
    shared, sharers_table = world.table("a")[1], world.table("b")
    assert world.block(shared).ref_cnt == 2
    own = world.table("a")[5]
    free = world.blocks.num_free_blocks()
    assert world.blocks.evict_blocks_for_request("a", [shared, own]) == 1
    assert world.blocks.num_free_blocks() == free + 1
    assert world.block(shared).ref_cnt == 1
    assert shared not in world.table("a")
    assert world.table("b") == sharers_table
    assert world.num_cached_blocks("b") == (4 * BLOCK + 30) // BLOCK
    # It left the index as well, so a third request stops before it.
    assert world.num_hits(TOKENS) == BLOCK
    world.check()
    world.manager.free(world.requests.pop("b"))
    world.check()


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 30, (0, 16, 1)),
        (1, 33, (16, 32, 1)),
        (16, 48, (16, 48, 2)),
        (5, 16, (5, 5, 0)),
        (17, 31, (17, 17, 0)),
        (16, 16, (16, 16, 0)),
        (40, 20, (40, 40, 0)),
        (-3, 40, (-3, -3, 0)),
        (500, 600, (500, 500, 0)),
        (90, 10_000, (96, 112, 1)),
    ],
)
def test_a_token_range_is_rounded_inward(world: World, start: int, end: int, expected: tuple[int, int, int]) -> None:
    world.run("a", TOKENS)
    free, table = world.blocks.num_free_blocks(), world.table("a")
    assert world.blocks.evict_token_range("a", start, end) == expected
    assert world.blocks.num_free_blocks() == free + expected[2]
    first, last = expected[0] // BLOCK, expected[1] // BLOCK
    if expected[2]:
        assert world.table("a") == table[:first] + table[last:]
    else:
        assert world.table("a") == table
    world.check()


def test_an_unknown_request_gives_the_empty_range(world: World) -> None:
    assert world.blocks.evict_token_range("nobody", 0, 64) == (0, 0, 0)
    assert world.blocks.num_blocks("nobody") == 0


def test_null_blocks_are_skipped(world: World) -> None:
    world.run("a", TOKENS)
    manager = world.manager.coordinator.single_type_managers[0]
    manager._remove_blocks_in_range("a", 1, 2)  # what the engine itself does to blocks outside a window
    free = world.blocks.num_free_blocks()
    null = world.manager.block_pool.null_block
    assert world.blocks.evict_blocks_for_request("a", [null.block_id]) == 0
    assert world.blocks.evict_token_range("a", 0, 3 * BLOCK) == (0, 3 * BLOCK, 2)
    assert world.blocks.num_free_blocks() == free + 2
    assert null.ref_cnt == 0 or null.is_null


def test_the_request_can_allocate_afterwards(world: World) -> None:
    request = world.run("a", TOKENS)
    start, end, _ = world.blocks.evict_token_range("a", BLOCK, 4 * BLOCK)
    world.blocks.withhold("a")
    cut_range(request, TokenRange(start, end), BLOCK)
    assert request.num_computed_tokens == len(TOKENS) - 3 * BLOCK == request.num_tokens
    request.append_output_token_ids([1] * (2 * BLOCK))
    new = world.manager.allocate_slots(request, 2 * BLOCK)
    assert new is not None
    request.num_computed_tokens += 2 * BLOCK
    assert len(world.table("a")) == -(-request.num_tokens // BLOCK)
    world.check()


def test_withheld_blocks_are_not_published_until_the_blocks_are_released(world: World) -> None:
    request = world.run("a", TOKENS)
    start, end, _ = world.blocks.evict_token_range("a", BLOCK, 3 * BLOCK)
    world.blocks.withhold("a")
    cut_range(request, TokenRange(start, end), BLOCK)
    survivors = list(request.all_token_ids)
    request.append_output_token_ids([1] * (2 * BLOCK))
    world.manager.allocate_slots(request, 2 * BLOCK)
    request.num_computed_tokens += 2 * BLOCK
    # Only what lies before the hole can be found under the survivors' tokens.
    assert world.num_hits([*survivors, *[1] * (2 * BLOCK)]) == BLOCK
    assert world.is_withheld("a")
    world.blocks.release(request)
    assert not world.is_withheld("a")
    assert request.num_computed_tokens == 0
    assert world.blocks.num_free_blocks() == world.blocks.num_pool_blocks


def test_publishing_without_the_mark_would_poison_the_cache(world: World) -> None:
    """The same steps without ``withhold``: contaminated blocks can be found. So the mark is needed."""
    request = world.run("a", TOKENS)
    start, end, _ = world.blocks.evict_token_range("a", BLOCK, 3 * BLOCK)
    cut_range(request, TokenRange(start, end), BLOCK)
    survivors = list(request.all_token_ids)
    request.append_output_token_ids([1] * (2 * BLOCK))
    world.manager.allocate_slots(request, 2 * BLOCK)
    table = world.table("a")
    assert any(world.block(block_id).block_hash is not None for block_id in table[4:])
    assert survivors


def test_a_request_with_tokens_in_flight_is_not_edited(world: World) -> None:
    request = world.run("a", TOKENS)
    request.num_in_flight_tokens = 1
    with pytest.raises(InvariantError, match="in flight"):
        cut_range(request, TokenRange(16, 32), BLOCK)
    with pytest.raises(InvariantError, match="in flight"):
        world.blocks.release(request)
    assert list(request.all_token_ids) == TOKENS


def test_more_than_one_cache_group_is_refused() -> None:
    class TwoGroups:
        class coordinator:  # noqa: N801
            single_type_managers = (object(), object())

    with pytest.raises(EngineContractError, match="exactly 1 group, got 2"):
        EngineBlocks(TwoGroups())

"""The op ``relocate``: what is read back through the block tables is what the plan retains."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.core.compaction import CompactionEvent, expand, retained_positions
from kvpolicy.core.draws import Draw, RingDraw, UniformDraw
from kvpolicy.core.errors import EngineContractError, InvariantError
from kvpolicy.core.philox import key_of
from kvpolicy.core.schedule import EventSchedule, token_schedule
from kvpolicy.core.spaces import LogicalPosition, blocks_for
from kvpolicy.kernels.expand.reference import expand_moves as reference_moves
from kvpolicy.kernels.expand.spec import HeadGrid
from kvpolicy.kernels.layout import bits_of
from tests.integration.kernels.implementations import FAST, NAMES, expand_moves, relocate
from tests.integration.kernels.pool import NUM_HEADS, NUM_LAYERS, Pool, Request, caches_of, layout_of
from tests.integration.kernels.strategies import lists_of_events

if TYPE_CHECKING:
    from collections.abc import Sequence

GRID = HeadGrid(num_layers=NUM_LAYERS, num_kv_heads=NUM_HEADS, first_layer=3, first_kv_head=1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("nhd", "hnd", "permuted", "probed")
DRAWS: tuple[Draw, ...] = (UniformDraw(), UniformDraw(is_shared=True), RingDraw(0), UniformDraw())


def event_of(request: Request, schedule: EventSchedule, draw: Draw, protected: int) -> CompactionEvent:
    """Return the event that is due."""
    ordinal = schedule.events_due_by(request.logical_length) - 1
    if isinstance(draw, RingDraw):
        draw = RingDraw(schedule.dropped_before(ordinal))
    return CompactionEvent(
        key=key_of(3, f"request-{request.tag}"),
        ordinal=ordinal,
        prompt_length=request.prompt_length,
        physical_length=request.physical_length,
        num_dropped=schedule.dropped_by(ordinal),
        num_protected=protected,
        draw=draw,
    )


class Run:
    """Several requests in one pool, appending and being compacted in random company."""

    def __init__(self, name: str, pool: Pool, *, seed: int) -> None:
        self.name, self.pool, self.random = name, pool, random.Random(seed)
        block_size = pool.layout.block_size
        self.protected = block_size // 2 + 3
        prompt = block_size + block_size // 4
        first = pool.admit(0, prompt)
        self.requests = [first, pool.admit(1, prompt, shared=first), pool.admit(2, 5), pool.admit(3, prompt)]
        self.schedules = [
            token_schedule(
                budget=request.prompt_length + block_size,
                buffer_size=self.protected,
                prompt_length=request.prompt_length,
            )
            for request in self.requests
        ]

    def step(self) -> None:
        """Bring some of the requests to their next event and apply those together; others just go on."""
        due = []
        for request, schedule, draw in zip(self.requests, self.schedules, DRAWS, strict=True):
            next_due = schedule.due_at(schedule.events_due_by(request.logical_length))
            missing = next_due - request.logical_length
            if self.random.random() < 0.6:
                self.pool.append(request, missing)
                due.append((request, event_of(request, schedule, draw, self.protected)))
            elif missing > 1:
                self.pool.append(request, self.random.randrange(missing))
        self.random.shuffle(due)
        self._apply([request for request, _ in due], [event for _, event in due])

    def _apply(self, requests: Sequence[Request], events: Sequence[CompactionEvent]) -> None:
        before = [self.pool.all_cells(layer) for layer in range(NUM_LAYERS)]
        moves = expand_moves(self.name)(events, GRID)
        tables = [list(request.table) for request in requests]
        relocate(self.name)(self.pool.caches, self.pool.layout, moves, tables)
        after = [self.pool.all_cells(layer) for layer in range(NUM_LAYERS)]
        relocate(self.name)(self.pool.caches, self.pool.layout, moves, tables)
        for layer in range(NUM_LAYERS):
            assert torch.equal(self.pool.all_cells(layer), after[layer]), "applied twice, changes something"
            self._check_untouched(requests, events, layer, before[layer], after[layer])
        for request, event in zip(requests, events, strict=True):
            self._shorten(request, event)
        self.check()

    def _check_untouched(
        self,
        requests: Sequence[Request],
        events: Sequence[CompactionEvent],
        layer: int,
        before: torch.Tensor,
        after: torch.Tensor,
    ) -> None:
        """Nothing but the destinations has changed: no prompt, no block of others, no free block."""
        may_change = torch.zeros(before.shape[:3], dtype=torch.bool)
        for request, event in zip(requests, events, strict=True):
            for head in range(NUM_HEADS):
                plan = expand(event, GRID.first_layer + layer, GRID.first_kv_head + head)
                for move in plan.moves:
                    assert move.destination >= request.prompt_length
                    index, token = divmod(move.destination, self.pool.layout.block_size)
                    assert self.pool.num_users[request.table[index]] == 1
                    may_change[request.table[index], head, token] = True
        has_changed = (before != after).any(dim=-1)
        assert not bool((has_changed & ~may_change).any())
        assert torch.equal(has_changed, may_change)

    def _shorten(self, request: Request, event: CompactionEvent) -> None:
        for (layer, head), held in request.history.items():
            plan = expand(event, GRID.first_layer + layer, GRID.first_kv_head + head)
            positions = [LogicalPosition(position) for position in held]
            kept = retained_positions(event, plan, positions)
            gone = {held[cell] for cell in plan.dropped}
            assert sorted(kept) == sorted(set(held) - gone)
            request.history[layer, head] = list(kept)
        self.pool.free_beyond(request, event.length_after)

    def check(self) -> None:
        """Every request reads every entry it holds, once, and where its history says."""
        for request in self.requests:
            for (layer, head), held in request.history.items():
                assert len(set(held)) == len(held) == request.physical_length
                assert held[: request.prompt_length] == list(range(request.prompt_length))
                expected = self.pool.expected(request, layer, head, torch.tensor(held))
                assert torch.equal(self.pool.read(request, layer, head), expected)


def pool_of(kind: str, dtype: torch.dtype, block_size: int, head_size: int) -> Pool:
    if kind == "probed":
        pytest.importorskip("vllm", reason="the probe asks vLLM's CPU backend")
    layout = layout_of(kind, dtype, block_size, head_size)
    # At most two blocks of budget, half a prompt block and two buffers per request.
    caches = caches_of(kind, dtype, 4 * 6, block_size, head_size)
    return Pool(layout=layout, caches=caches, seed=block_size)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_survivor_is_read_back(name: str, kind: str, dtype: torch.dtype, block_size: int, head_size: int) -> None:
    pool = pool_of(kind, dtype, block_size, head_size)
    run = Run(name, pool, seed=head_size)
    run.check()
    for _ in range(5):
        run.step()
    for cache in pool.caches:
        assert_padding_is_untouched(cache, kind)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["nhd", "hnd", "permuted"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_every_survivor_is_read_back_at_odd_sizes(name: str, kind: str, dtype: torch.dtype) -> None:
    for block_size, head_size in ((3, 5), (1, 1), (16, 2)):
        pool = pool_of(kind, dtype, block_size, head_size)
        # Blocks of one token: a request takes as many blocks as it has entries.
        pool = Pool(layout=pool.layout, caches=caches_of(kind, dtype, 96, block_size, head_size), seed=0)
        run = Run(name, pool, seed=1)
        for _ in range(6):
            run.step()


def assert_padding_is_untouched(cache: torch.Tensor, kind: str) -> None:
    """The memory around the view is still NaN."""
    storage = torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage())
    if kind == "nhd":
        num_blocks, num_heads, block_size, columns = cache.shape
        assert bool(storage.view(num_blocks, block_size, num_heads + 1, columns)[:, :, num_heads].isnan().all())
    else:
        assert bool(storage[: cache.storage_offset()].isnan().all())


@pytest.mark.parametrize("name", FAST)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_random_events_on_random_bytes(name: str, data: st.DataObject) -> None:
    """Like the reference, for every element size; tables name blocks in any order."""
    events = data.draw(lists_of_events())
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.float64]))
    kind = data.draw(st.sampled_from(["nhd", "hnd", "permuted"]))
    block_size = data.draw(st.sampled_from([1, 4, 7]))
    needed = [blocks_for(event.physical_length, block_size) for event in events]
    block_ids = list(range(sum(needed) + 2))
    data.draw(st.randoms(use_true_random=False)).shuffle(block_ids)
    tables = [[block_ids.pop() for _ in range(count)] for count in needed]
    layout = layout_of(kind, dtype, block_size, 3)
    before = [random_bytes((sum(needed) + 2, NUM_HEADS, block_size, 6), dtype, kind) for _ in range(NUM_LAYERS)]
    moves = reference_moves(events, GRID)
    results = []
    for implementation in (name, "reference"):
        caches = [cache.clone(memory_format=torch.preserve_format) for cache in before]
        relocate(implementation)(caches, layout, moves, tables)
        results.append([bits_of(cache) for cache in caches])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> torch.Tensor:
    blocks, heads, tokens, columns = shape
    swapped = kind == "nhd"
    memory = torch.randint(
        0, 256, (blocks, *((tokens, heads) if swapped else (heads, tokens)), columns * dtype.itemsize)
    )
    cache = memory.to(torch.uint8).view(dtype)
    return cache.transpose(1, 2) if swapped else cache


def test_hand_computed() -> None:
    """Blocks of 2, table [3, 0, 2]: in head 1, cell 4 (block 2, token 0) goes to cell 1 (block 3, token 1)."""
    moves = reference_moves([], HeadGrid(num_layers=1, num_kv_heads=2))
    columns = (torch.tensor([value]) for value in (0, 0, 1, 4, 1))
    names = ("layer", "request", "kv_head", "source", "destination")
    moves = evolve(moves, layer_starts=[0, 1], **dict(zip(names, columns, strict=True)))
    for name in NAMES:
        cache = torch.arange(4 * 2 * 2 * 2, dtype=torch.float32).view(4, 2, 2, 2)
        expected = cache.clone()
        # Head 1 of block 2 begins at 2 * 8 + 4 = 20, token 1 of head 1 of block 3 at 3 * 8 + 4 + 2 = 30.
        expected.view(-1)[30], expected.view(-1)[31] = 20, 21
        relocate(name)([cache], layout_of("hnd", cache.dtype, 2, 1), moves, [[3, 0, 2]])
        assert torch.equal(cache, expected), name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["hnd", "permuted"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tables": [[0, 1], [2, 3]]}, InvariantError, "KV index [67] of request 0 lies outside its table of 2 blocks"),
        ({"tables": [[0, 1, 9], [2, 3, 4]]}, InvariantError, "expected block ids from 0 to 7, got 0 to 9"),
        ({"tables": [[0, 1, -1], [2, 3, 4]]}, InvariantError, "expected block ids from 0 to 7, got -1 to 4"),
        ({"num_layers": 1}, InvariantError, r"caches: expected 2 \(one per layer\), got 1"),
        ({"num_heads": 1}, InvariantError, "moves: expected KV heads from 0 to 0, got 1"),
        (
            {"head_size": 5},
            EngineContractError,
            r"expected the shape \(num_blocks, num_kv_heads, 3, 4\), got \(8, 2, 3, 10\)",
        ),
    ],
)
def test_wrong_arguments_change_nothing(
    name: str, kind: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Two requests of 8 entries in blocks of 3: three blocks each."""
    options: dict[str, Any] = {"tables": [[0, 1, 5], [2, 3, 4]], "num_layers": 2, "num_heads": 2, "head_size": 2}
    options |= change
    event = CompactionEvent(
        key=(0, 0), ordinal=0, prompt_length=1, physical_length=8, num_dropped=2, num_protected=1, draw=RingDraw(0)
    )
    moves = reference_moves([event, event], GRID)
    shape = (8, options["num_heads"], 3, 2 * options["head_size"])
    caches = [torch.rand(shape) for _ in range(options["num_layers"])]
    before = [cache.clone() for cache in caches]
    with pytest.raises(error, match=message):
        relocate(name)(caches, layout_of(kind, torch.float32, 3, 2), moves, options["tables"])
    assert all(torch.equal(one, other) for one, other in zip(caches, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.uint8, *DTYPES], ids=str)
def test_nothing_is_compiled_after_the_warm_up(dtype: torch.dtype) -> None:
    from kvpolicy.kernels.relocate import compiled

    compiled.warm_up(dtype)
    functions: tuple[Any, ...] = (compiled._resolve, compiled._copy_elements, compiled._copy_rows)
    before = [len(function.signatures) for function in functions]
    event = CompactionEvent(
        key=(0, 0), ordinal=0, prompt_length=1, physical_length=8, num_dropped=2, num_protected=1, draw=RingDraw(0)
    )
    for name in NAMES:
        for kind in ("nhd", "hnd", "permuted"):
            caches = [random_bytes((8, NUM_HEADS, 3, 4), dtype, kind) for _ in range(NUM_LAYERS)]
            moves = expand_moves(name)([event], GRID)
            compiled.relocate(caches, layout_of(kind, dtype, 3, 2), moves, [[0, 1, 2]])
    assert [len(function.signatures) for function in functions] == before

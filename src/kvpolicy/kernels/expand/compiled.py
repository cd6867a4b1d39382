"""Compiled loops for the CPU: no mask over all KV heads, no sorting of all candidates. Needs numba.

Nothing is compiled on import. ``warm_up`` does it; otherwise the first call takes a second or two longer.
"""

# ruff: noqa: PLR0913, PLR0917 - compiled code takes arrays and numbers, not objects

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
from numba import njit

from kvpolicy.core.compaction import ORDINAL_BITS, CompactionEvent
from kvpolicy.core.draws import BlockDraw, RingDraw, UniformDraw
from kvpolicy.kernels.expand.spec import HeadGrid, Moves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_F = TypeVar("_F", bound="Callable[..., object]")

_OWN, _SHARED, _RING = 0, 1, 2
_WORDS_PER_CALL = 4
_NUM_ROUNDS = 10
# As in the core. Unsigned, or numba would go over to floating point where signs mix.
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_MASK, _WORD_BITS = np.uint64(0xFFFFFFFF), np.uint64(32)
_ORDINAL_BITS = np.uint64(ORDINAL_BITS)


def expand_moves(events: Sequence[CompactionEvent], grid: HeadGrid) -> Moves:
    """Return the moves of every event in every KV head of the grid, on the CPU. Pure."""
    rows = [_row(event) for event in events if not isinstance(event.draw, BlockDraw)]
    requests = [i for i, event in enumerate(events) if not isinstance(event.draw, BlockDraw)]
    table = np.array(rows, dtype=np.int64).reshape(-1, 9)
    most = sum(event.num_dropped for event in events) * grid.num_layers * grid.num_kv_heads
    # One allocation that the moves keep; it is cut to the number of moves, which depends on the draw.
    columns = np.empty((5, most), dtype=np.int64)
    starts = np.zeros(grid.num_layers + 1, dtype=np.int64)
    _expand(
        table,
        np.array(requests, dtype=np.int64),
        (grid.first_layer, grid.num_layers, grid.first_kv_head, grid.num_kv_heads),
        columns,
        starts,
    )
    layer, request, kv_head, source, destination = torch.from_numpy(columns)[:, : starts[-1]]
    return Moves(
        layer=layer,
        request=request,
        kv_head=kv_head,
        source=source,
        destination=destination,
        layer_starts=starts.tolist(),
    )


def warm_up() -> None:
    """Compile now."""
    event = CompactionEvent(
        key=(0, 0), ordinal=0, prompt_length=1, physical_length=4, num_dropped=1, num_protected=1, draw=UniformDraw()
    )
    expand_moves([event], HeadGrid(num_layers=1, num_kv_heads=1))


def _row(event: CompactionEvent) -> tuple[int, ...]:
    draw = event.draw
    kind, start = (_RING, draw.start) if isinstance(draw, RingDraw) else (_OWN, 0)
    if isinstance(draw, UniformDraw) and draw.is_shared:
        kind = _SHARED
    width = event.candidates.width
    # A start may be any integer; only where it falls on the ring matters.
    start %= max(width, 1)
    return (
        kind,
        start,
        event.prompt_length,
        width,
        event.num_dropped,
        event.physical_length,
        event.ordinal,
        *event.key,
    )


def _jit(function: _F) -> _F:
    return cast("_F", njit(nogil=True)(function))


@_jit
def _expand(
    table: np.ndarray,
    requests: np.ndarray,
    grid: tuple[int, int, int, int],
    columns: np.ndarray,
    starts: np.ndarray,
) -> None:
    """Fill ``columns`` (layer, request, KV head, source, destination) and ``starts``, in order."""
    first_layer, num_layers, first_kv_head, num_kv_heads = grid
    widest, most = 0, 0
    for i in range(len(table)):
        widest = max(widest, table[i, 3])
        most = max(most, table[i, 4])
    keys = np.empty(widest + _WORDS_PER_CALL, dtype=np.uint64)
    scratch = np.empty(widest + _WORDS_PER_CALL, dtype=np.uint64)
    # Source and destination, per request.
    kept = np.empty((len(table), 2, most), dtype=np.int64)
    num_kept = np.full(len(table), -1, dtype=np.int64)
    total = 0
    for layer in range(num_layers):
        for i in range(len(table)):
            kind, start, prompt, width, num_dropped, length, ordinal, key_0, key_1 = table[i]
            for kv_head in range(num_kv_heads):
                # What all KV heads share is computed in the first one and kept.
                if kind == _OWN or num_kept[i] < 0:
                    if kind == _RING:
                        num_kept[i] = _ring(start, prompt, width, num_dropped, length, kept[i])
                    else:
                        stream = (first_layer + layer, first_kv_head + kv_head)
                        if kind == _SHARED:
                            stream = (0, 0)
                        _draw(keys, width, ordinal, stream, (key_0, key_1))
                        num_kept[i] = _uniform(keys, scratch, prompt, width, num_dropped, length, kept[i])
                moves, num_moves = kept[i], num_kept[i]
                for j in range(num_moves):
                    columns[0, total + j] = layer
                    columns[1, total + j] = requests[i]
                    columns[2, total + j] = kv_head
                    columns[3, total + j] = moves[0, j]
                    columns[4, total + j] = moves[1, j]
                total += num_moves
        starts[layer + 1] = total


@_jit
def _draw(keys: np.ndarray, width: int, event_ordinal: int, stream: tuple[int, int], key: tuple[int, int]) -> None:
    """Fill ``keys`` with (priority, ordinal) of the candidates, up to three more behind the last of them."""
    num_calls = (width + _WORDS_PER_CALL - 1) // _WORDS_PER_CALL
    for call in range(num_calls):
        c0, c1, c2, c3 = np.uint64(call), np.uint64(event_ordinal), np.uint64(stream[0]), np.uint64(stream[1])
        k0, k1 = np.uint64(key[0]), np.uint64(key[1])
        for _ in range(_NUM_ROUNDS):
            p0, p1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
            c0, c1 = (p1 >> _WORD_BITS) ^ c1 ^ k0, p1 & _MASK
            c2, c3 = (p0 >> _WORD_BITS) ^ c3 ^ k1, p0 & _MASK
            k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
        first = np.uint64(_WORDS_PER_CALL * call)
        keys[_WORDS_PER_CALL * call] = (c0 << _ORDINAL_BITS) | first
        keys[_WORDS_PER_CALL * call + 1] = (c1 << _ORDINAL_BITS) | (first + np.uint64(1))
        keys[_WORDS_PER_CALL * call + 2] = (c2 << _ORDINAL_BITS) | (first + np.uint64(2))
        keys[_WORDS_PER_CALL * call + 3] = (c3 << _ORDINAL_BITS) | (first + np.uint64(3))


@_jit
def _uniform(
    keys: np.ndarray, scratch: np.ndarray, prompt: int, width: int, num_dropped: int, length: int, moves: np.ndarray
) -> int:
    """Fill ``moves`` (source, destination) from the keys of one KV head; return their number."""
    if num_dropped == 0:
        return 0
    limit = _nth_smallest(keys, scratch, width, num_dropped)
    end = length - prompt
    num_moves, hole = 0, 0
    for ordinal in range(end - num_dropped, end):
        if ordinal >= width or keys[ordinal] > limit:
            while keys[hole] > limit:
                hole += 1
            moves[0, num_moves] = prompt + ordinal
            moves[1, num_moves] = prompt + hole
            num_moves += 1
            hole += 1
    return num_moves


@_jit
def _nth_smallest(keys: np.ndarray, scratch: np.ndarray, width: int, count: int) -> int:
    """Return the ``count``-th smallest of ``width`` different keys.

    Keys are uniform over their range, so a bound a few standard deviations above the expected one leaves little
    more than ``count`` of them; where it leaves fewer, all are looked at.
    """
    share = (count + 4.0 * np.sqrt(count) + 4.0) / width
    few = 0
    if share < 1.0:
        bound = np.uint64(share * 2.0 ** (32 + ORDINAL_BITS))
        for i in range(width):
            scratch[few] = keys[i]
            few += keys[i] < bound
    if few < count:
        few = width
        scratch[:width] = keys[:width]
    return _select(scratch, few, count - 1)


@_jit
def _select(values: np.ndarray, size: int, rank: int) -> int:
    """Return the value that sorting the first ``size`` would put at ``rank``; reorders them (quickselect, Hoare)."""
    low, high = 0, size - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if rank <= j:
            high = j
        elif rank >= i:
            low = i
        else:
            break
    return values[rank]  # type: ignore[no-any-return] # numpy is `Any` here


@_jit
def _ring(start: int, prompt: int, width: int, num_dropped: int, length: int, moves: np.ndarray) -> int:
    """Fill ``moves`` (source, destination): sources ascend, holes are in ring order; return their number."""
    end = length - prompt
    num_moves, step = 0, 0
    for ordinal in range(end - num_dropped, end):
        if ordinal >= width or (ordinal - start) % width >= num_dropped:
            hole = (start + step) % width
            while hole >= end - num_dropped:
                step += 1
                hole = (start + step) % width
            moves[0, num_moves] = prompt + ordinal
            moves[1, num_moves] = prompt + hole
            num_moves += 1
            step += 1
    return num_moves

"""Vectorised over all events, layers and KV heads; runs on any device.

Entries after the prompt are numbered by ordinal, so that requests of different lengths share one axis. A uniform
draw costs one mask of shape (layers, requests, KV heads, ordinals): its surviving tail entries and its holes below
the new end are equally many per KV head and ascend on both sides, so listing both lines them up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpolicy.core.compaction import ORDINAL_BITS, CompactionEvent
from kvpolicy.core.draws import RingDraw, UniformDraw
from kvpolicy.kernels.expand.spec import HeadGrid, Moves, moves_of
from kvpolicy.kernels.expand.torch_philox import philox4x32

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORDS_PER_CALL = 4
_NEVER = torch.iinfo(torch.int64).max

Columns = tuple[torch.Tensor, ...]


def expand_moves(events: Sequence[CompactionEvent], grid: HeadGrid, *, device: torch.device | None = None) -> Moves:
    """Return the moves of every event in every KV head of the grid. Pure.

    Args:
        events: one per request.
        grid: the KV heads.
        device: where to compute, and where the moves are then; the CPU unless given. Waits for it: how many moves
            there are depends on the draw.
    """
    device = device or torch.device("cpu")
    parts: list[Columns] = []
    if own := [i for i, event in enumerate(events) if _is_uniform(event, is_shared=False)]:
        layers = torch.arange(grid.num_layers, device=device)
        kv_heads = torch.arange(grid.num_kv_heads, device=device)
        streams = layers + grid.first_layer, kv_heads + grid.first_kv_head
        parts.append(_uniform_moves(events, own, *streams))
        if len(own) == len(events):
            return moves_of(parts[0], grid.num_layers)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    if shared := [i for i, event in enumerate(events) if _is_uniform(event, is_shared=True)]:
        parts.append(_in_every_head(_uniform_moves(events, shared, zero, zero), grid))
    parts += [
        _in_every_head(_ring_moves(i, event, event.draw, device), grid)
        for i, event in enumerate(events)
        if isinstance(event.draw, RingDraw)
    ]
    return moves_of(_merged(parts, len(events), grid, device), grid.num_layers)


def _is_uniform(event: CompactionEvent, *, is_shared: bool) -> bool:
    return isinstance(event.draw, UniformDraw) and event.draw.is_shared == is_shared


def _uniform_moves(
    events: Sequence[CompactionEvent], chosen: list[int], layers: torch.Tensor, kv_heads: torch.Tensor
) -> Columns:
    """Return the sorted moves of the chosen events. Layers and KV heads are numbers over the model."""
    rows = [_row(i, events[i]) for i in chosen]
    # Every column gets the axes (layer, request, KV head, ordinal).
    table = torch.tensor(rows, dtype=torch.int64).to(layers.device).T[:, None, :, None, None]
    request, prompt, width, num_dropped, length, event_ordinal, key_0, key_1 = table
    num_ordinals = max(events[i].physical_length - events[i].prompt_length for i in chosen)
    ordinals = torch.arange(num_ordinals, device=layers.device)
    calls = torch.arange(-(-num_ordinals // _WORDS_PER_CALL), device=layers.device)
    words = philox4x32((calls, event_ordinal, layers[:, None, None, None], kv_heads[:, None]), (key_0, key_1))
    keys = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)[..., :num_ordinals]
    keys = ((keys << ORDINAL_BITS) | ordinals).masked_fill_(ordinals >= width, _NEVER)
    is_dropped = keys <= _nth_smallest(keys, num_dropped, max(events[i].num_dropped for i in chosen))
    end = length - prompt
    is_tail = (ordinals >= end - num_dropped) & (ordinals < end)
    layer, row, kv_head, source = torch.nonzero(is_tail & ~is_dropped, as_tuple=True)
    hole = torch.nonzero(is_dropped & (ordinals < end - num_dropped), as_tuple=True)[-1]
    first = prompt.flatten()[row]
    return layer, request.flatten()[row], kv_head, source + first, hole + first


def _row(request: int, event: CompactionEvent) -> tuple[int, ...]:
    numbers = event.prompt_length, event.candidates.width, event.num_dropped, event.physical_length, event.ordinal
    return request, *numbers, *event.key


def _nth_smallest(keys: torch.Tensor, count: torch.Tensor, largest_count: int) -> torch.Tensor:
    """Return the ``count``-th smallest key along the last axis; below all of them where ``count`` is 0."""
    if largest_count == 0:
        return torch.full_like(count, -1)
    smallest = keys.topk(largest_count, largest=False, sorted=True).values
    index = (count - 1).clamp(min=0).expand(*smallest.shape[:-1], 1)
    return smallest.gather(-1, index).masked_fill_(count == 0, -1)


def _ring_moves(request: int, event: CompactionEvent, draw: RingDraw, device: torch.device) -> Columns:
    """Return the moves of one KV head, holes in ring order, as columns with layer and KV head 0."""
    steps = torch.arange(event.num_dropped, device=device)
    # Without candidates nothing is dropped, and the width does not matter. A start may be too large for a tensor.
    width = max(event.candidates.width, 1)
    dropped = (draw.start % width + steps) % width + event.prompt_length
    tail = steps + event.length_after
    source = tail[~torch.isin(tail, dropped)]
    zero = torch.zeros_like(source)
    return zero, zero + request, zero, source, dropped[dropped < event.length_after]


def _in_every_head(columns: Columns, grid: HeadGrid) -> Columns:
    """Return one KV head's moves for every layer and KV head of the grid; not sorted by request before KV head."""
    _, request, _, source, destination = columns
    shape = (grid.num_layers, grid.num_kv_heads, source.numel())
    layer = torch.arange(grid.num_layers, device=source.device)[:, None, None]
    kv_head = torch.arange(grid.num_kv_heads, device=source.device)[:, None]
    spread = (layer, request, kv_head, source, destination)
    return tuple(column.expand(shape).flatten() for column in spread)


def _merged(parts: list[Columns], num_requests: int, grid: HeadGrid, device: torch.device) -> Columns:
    """Return all parts as one, sorted by layer, request and KV head; what a KV head has keeps its order."""
    if not parts:
        return tuple(torch.empty((5, 0), dtype=torch.int64, device=device))
    columns = tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))
    layer, request, kv_head, *_ = columns
    rank = (layer * num_requests + request) * grid.num_kv_heads + kv_head
    order = torch.argsort(rank, stable=True)
    return tuple(column[order] for column in columns)

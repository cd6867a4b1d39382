"""What a worker does for events, whatever runner it has: expand them, move the entries, shorten the tables."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from attrs import define, field

from kvpolicy.adapters.vllm.shared.messages import CompactionWork
from kvpolicy.core.compaction import surviving_blocks
from kvpolicy.kernels.copy_blocks import copy_blocks
from kvpolicy.kernels.expand import torch as torch_expand
from kvpolicy.kernels.relocate import torch as torch_relocate

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvpolicy.adapters.vllm.shared.messages import Compaction
    from kvpolicy.kernels.expand.spec import HeadGrid
    from kvpolicy.kernels.layout import KVLayout


@define(kw_only=True)
class Compactor:
    """The KV caches of one worker, and what was done to them since ``take_work``.

    Attributes:
        caches: by local layer.
        layout: of each of them.
        grid: the KV heads that they hold, counted over the whole model.
        block_size: entries in one block.
        is_compiled: whether compiled loops are used (CPU only, needs numba) instead of tensor operations.
    """

    caches: Sequence[torch.Tensor]
    layout: KVLayout
    grid: HeadGrid
    block_size: int
    is_compiled: bool = False
    _expand: Any = field(init=False, default=torch_expand)
    _relocate: Any = field(init=False, default=torch_relocate)
    _work: CompactionWork | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        if self.is_compiled:
            from kvpolicy.kernels.expand import compiled as compiled_expand
            from kvpolicy.kernels.relocate import compiled as compiled_relocate

            self._expand, self._relocate = compiled_expand, compiled_relocate

    def warm_up(self) -> None:
        """Compile what will be needed, so that the first event does not wait for it."""
        if self.is_compiled:
            self._expand.warm_up()
            self._relocate.warm_up(self.caches[0].dtype)

    def apply(self, compactions: Sequence[Compaction], tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """Carry events out; return the tables as they are afterwards.

        Args:
            compactions: the step's events, at most one for a request.
            tables: block ids of each one's request before the event.

        Doing it twice before anything else is written changes nothing more.
        """
        started = time.perf_counter()
        events = [compaction.event for compaction in compactions]
        owned = [_owned(table, compaction) for table, compaction in zip(tables, compactions, strict=True)]
        copy_blocks(self.caches, [pair for compaction in compactions for pair in compaction.copies])
        # The compiled one knows no other device than the CPU.
        where = {} if self.is_compiled else {"device": self.caches[0].device}
        moves = self._expand.expand_moves(events, self.grid, **where)
        expanded = time.perf_counter()
        self._relocate.relocate(self.caches, self.layout, moves, owned)
        done = time.perf_counter()
        work = CompactionWork(num_moved=moves.source.numel(), expand_s=expanded - started, relocate_s=done - expanded)
        self._work = work if self._work is None else self._work.plus(work)
        return [
            [table[i] for i in surviving_blocks(event, self.block_size)]
            for table, event in zip(owned, events, strict=True)
        ]

    def take_work(self) -> CompactionWork | None:
        """Return what was done since the last call; None if nothing was."""
        work, self._work = self._work, None
        return work


def _owned(table: Sequence[int], compaction: Compaction) -> list[int]:
    """Return a table with its shared blocks replaced by their private copies."""
    replaced = dict(compaction.copies)
    return [replaced.get(block, block) for block in table]

"""What goes in and out of every implementation: the KV heads of one worker, and the moves for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import asdict, field, frozen

from kvpolicy.core.checks import integer_errors, reject

if TYPE_CHECKING:
    from collections.abc import Iterable


@frozen(kw_only=True)
class HeadGrid:
    """The KV heads that one worker holds, as numbers over the whole model: those are what a draw depends on.

    With pipeline and tensor parallelism every worker has a rectangle of the model's layers x KV heads.

    Attributes:
        num_layers: layers held.
        num_kv_heads: KV heads held of each of them.
        first_layer: number of the first one in the model.
        first_kv_head: number of the first one in the model.
    """

    num_layers: int
    num_kv_heads: int
    first_layer: int = 0
    first_kv_head: int = 0

    def __attrs_post_init__(self) -> None:
        least = {"num_layers": 1, "num_kv_heads": 1, "first_layer": 0, "first_kv_head": 0}
        reject(
            error
            for name, value in asdict(self).items()
            for error in integer_errors(f"grid.{name}", value, least[name])
        )


@frozen(kw_only=True, eq=False)
class Moves:
    """Copies of KV cells inside requests, sorted by layer, request and KV head, and then as the plan has them.

    The contract of ``kvpolicy.core.compaction`` holds: any order, no scratch memory, and twice is like once.

    Attributes:
        layer: int64, shape (num_moves,), counted from the grid's first one, as are KV heads.
        request: int64, shape (num_moves,), index of the event.
        kv_head: int64, shape (num_moves,).
        source: int64, shape (num_moves,), KV index.
        destination: int64, shape (num_moves,), KV index.
        layer_starts: layer i has the moves ``[layer_starts[i], layer_starts[i + 1])``; one number more than layers.
    """

    layer: torch.Tensor
    request: torch.Tensor
    kv_head: torch.Tensor
    source: torch.Tensor
    destination: torch.Tensor
    layer_starts: list[int] = field(repr=False)

    @property
    def num_moves(self) -> int:
        """Number of cells to copy."""
        return self.layer_starts[-1]

    def columns(self) -> tuple[torch.Tensor, ...]:
        """Return layer, request, KV head, source and destination, in this order."""
        return self.layer, self.request, self.kv_head, self.source, self.destination


def moves_of(columns: Iterable[torch.Tensor], num_layers: int) -> Moves:
    """Return moves that are sorted already.

    Args:
        columns: layer, request, KV head, source and destination: int64, shape (num_moves,).
        num_layers: of the grid.
    """
    layer, request, kv_head, source, destination = columns
    bounds = torch.arange(num_layers + 1, device=layer.device)
    return Moves(
        layer=layer,
        request=request,
        kv_head=kv_head,
        source=source,
        destination=destination,
        layer_starts=torch.searchsorted(layer, bounds).tolist(),
    )

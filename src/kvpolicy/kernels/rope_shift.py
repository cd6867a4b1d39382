"""RoPE positions of requests whose index space has shrunk: position = index + shift, per row of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def shift_by_row(row_ids: Sequence[str], shifts: Mapping[str, int], device: torch.device) -> torch.Tensor:
    """Return the shift of each batch row; rows without an entry in ``shifts`` get 0.

    Args:
        row_ids: request ids in batch row order.
        shifts: positions to add for each request id whose shift is not 0.
        device: where the result lives.

    Returns:
        int64 tensor, shape (num_rows,), contiguous.

    >>> shift_by_row(["a", "b"], {"b": 96}, torch.device("cpu")).tolist()
    [0, 96]
    """
    return torch.tensor([shifts.get(row_id, 0) for row_id in row_ids], dtype=torch.int64, device=device)


def add_row_shift(positions: torch.Tensor, row_of_token: torch.Tensor, row_shift: torch.Tensor) -> None:
    """Add each token's row shift to its position, in place.

    Args:
        positions: int64, shape (num_tokens,), the buffer (or a view of it) that the rotary embedding reads.
        row_of_token: int64, shape (num_tokens,), batch row of each token.
        row_shift: int64, shape (num_rows,).

    In place because captured graphs read this very buffer. Call it after the slot mapping was computed: slots follow
    the index, rotation follows the position.

    >>> p = torch.tensor([7, 0, 1])
    >>> add_row_shift(p, torch.tensor([0, 1, 1]), torch.tensor([0, 96])); p.tolist()
    [7, 96, 97]
    """
    positions += row_shift[row_of_token]

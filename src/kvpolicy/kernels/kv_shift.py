"""Physical lengths and KV indices of compacted requests: logical minus the entries dropped, per row of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def lower_lengths(lengths: torch.Tensor, row_shift: torch.Tensor) -> None:
    """Turn logical lengths into physical ones, in place.

    Args:
        lengths: integers, shape (num_rows,): the buffer (or a view of it) that attention reads.
        row_shift: int64, shape (num_rows,): entries dropped per KV head so far.

    >>> import torch
    >>> lengths = torch.tensor([300, 20], dtype=torch.int32)
    >>> lower_lengths(lengths, torch.tensor([64, 0])); lengths.tolist()
    [236, 20]
    """
    lengths -= row_shift.to(device=lengths.device, dtype=lengths.dtype)


def kv_indices(positions: torch.Tensor, row_of_token: torch.Tensor, row_shift: torch.Tensor) -> torch.Tensor:
    """Return where each token is cached: its logical position minus what its request has dropped.

    Args:
        positions: int64, shape (num_tokens,); left as they are, the rotation follows them.
        row_of_token: int64, shape (num_tokens,), batch row of each token.
        row_shift: int64, shape (num_rows,).

    Returns:
        int64, shape (num_tokens,).

    >>> import torch
    >>> kv_indices(torch.tensor([299, 18, 19]), torch.tensor([0, 1, 1]), torch.tensor([64, 0])).tolist()
    [235, 18, 19]
    """
    return positions - row_shift[row_of_token]

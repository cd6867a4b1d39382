"""Philox4x32-10 on int64 tensors: the words of ``kvpolicy.core.philox``, many calls at once, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.core.philox import WORD_LIMIT

if TYPE_CHECKING:
    import torch

_MASK = WORD_LIMIT - 1
_NUM_ROUNDS = 10
# As in the core.
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85

Words = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return four tensors of random words, of the shape that the arguments broadcast to.

    Args:
        counter: four int64 tensors of words (0 to 2^32 - 1).
        key: two of the same kind.

    The product of two words may pass 2^63. It wraps, and the bits are still right; the arithmetic shift then brings
    copies of the sign into the upper half, which the mask takes away. Where a word is only going to be XORed into
    one that gets masked, its upper half may stay. Axes broadcast, so the first rounds work on small tensors.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = ((p1 >> 32) ^ (c1 ^ k0)) & _MASK, p1, ((p0 >> 32) ^ (c3 ^ k1)) & _MASK, p0
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK

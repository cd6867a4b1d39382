"""Philox4x32-10: random words that depend on a counter and a key, and on nothing else.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), section 3.3. No deviation:
the known-answer vectors published with it are a test. There is no state, so every process and every device
computes the same words in any order.
"""

from __future__ import annotations

from hashlib import blake2b

from kvpolicy.core.checks import is_at_least, reject, text_errors

WORD_LIMIT = 1 << 32
"""Words lie below this."""

_SEED_LIMIT = 1 << 64
_MASK = WORD_LIMIT - 1
_NUM_ROUNDS = 10
# Multipliers and the increments of the key (the golden ratio and sqrt(3) - 1, as fractions of 2^32).
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85

Key = tuple[int, int]
"""Two words that stand for a seed and a request."""
Counter = tuple[int, int, int, int]
"""Four words that stand for one call."""


def philox4x32(counter: Counter, key: Key) -> tuple[int, int, int, int]:
    """Return four random words. Every word of the arguments is below ``WORD_LIMIT`` (not checked).

    >>> [f"{word:08x}" for word in philox4x32((0, 0, 0, 0), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        p0, p1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def key_of(seed: int, request_key: str) -> Key:
    """Return the key of a request: the BLAKE2b digest of seed and request key, as two little-endian words.

    The same in every process, unlike a Python hash. What is hashed for seed 1 and request key ``"a"`` are the
    nine bytes ``01 00 00 00 00 00 00 00 61``, into eight.

    >>> [f"{word:08x}" for word in key_of(1, "a")]
    ['ecf46fb8', '80489184']

    Raises:
        PolicyUsageError: the seed is no integer of 64 bits, or the request key no text that UTF-8 can encode.
    """
    reject([*seed_errors(seed), *text_errors("request_key", request_key)])
    digest = blake2b(seed.to_bytes(8, "little") + request_key.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def seed_errors(seed: object) -> tuple[str, ...]:
    """Return the complaint about an argument that must be a seed; empty if it is one."""
    if is_at_least(seed, 0) and seed < _SEED_LIMIT:
        return ()
    return (f"seed: expected an integer from 0 to 2**64 - 1, got {seed!r}",)

"""The index spaces, the one range type, and how token ranges become whole blocks.

Logical positions and KV indices are equal until the first eviction, so they have distinct types (``NewType``: checked
by mypy, free at run time). Every interval is half-open.
"""

from __future__ import annotations

from typing import NewType

from attrs import frozen

from kvpolicy.core.checks import integer_errors, reject

LogicalPosition = NewType("LogicalPosition", int)
"""Index of a token in the full sequence. Fixes its RoPE phase; never changes while its K is cached."""
KVIndex = NewType("KVIndex", int)
"""Rank of an entry among those that the request still holds."""


@frozen
class TokenRange:
    """Tokens ``start`` to ``end - 1`` of some index space."""

    start: int
    end: int

    def __attrs_post_init__(self) -> None:
        reject(integer_errors("range.start", self.start, 0))
        reject(integer_errors("range.end", self.end, self.start, because="start"))

    @property
    def width(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    @property
    def is_empty(self) -> bool:
        """Whether there is no token in it."""
        return self.start == self.end

    def contains(self, other: TokenRange) -> bool:
        """Return whether the other range lies in this one; an empty one does if its place does.

        >>> TokenRange(0, 16).contains(TokenRange(16, 16))
        True
        """
        return self.start <= other.start and other.end <= self.end


@frozen(kw_only=True)
class BlockSpan:
    """Whole blocks ``first`` to ``last - 1`` of one request's table, counted from its beginning."""

    first: int
    last: int
    block_size: int

    def __attrs_post_init__(self) -> None:
        reject(integer_errors("span.block_size", self.block_size, 1))
        reject(integer_errors("span.first", self.first, 0))
        reject(integer_errors("span.last", self.last, self.first, because="first"))

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.last - self.first

    @property
    def is_empty(self) -> bool:
        """Whether there is no block in it."""
        return self.first == self.last

    @property
    def tokens(self) -> TokenRange:
        """The tokens that those blocks hold."""
        return TokenRange(self.first * self.block_size, self.last * self.block_size)


def align_inward(tokens: TokenRange, block_size: int) -> BlockSpan:
    """Return the whole blocks inside a token range: its start is rounded up, its end down.

    An empty span starts at the first block boundary that is not before the range.

    >>> align_inward(TokenRange(0, 30), 16)
    BlockSpan(first=0, last=1, block_size=16)
    >>> align_inward(TokenRange(1, 31), 16).is_empty
    True
    """
    reject(integer_errors("block_size", block_size, 1))
    first = blocks_for(tokens.start, block_size)
    return BlockSpan(first=first, last=max(first, tokens.end // block_size), block_size=block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold ``num_tokens`` tokens.

    >>> [blocks_for(n, 16) for n in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-num_tokens // block_size)

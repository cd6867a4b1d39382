"""What the books need of an engine: block tables and per-token arrays, which each version edits in its own way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpolicy.core.spaces import TokenRange


class BlockTables(Protocol):
    """Blocks of the engine's single KV-cache group, by request."""

    def num_blocks(self, request_id: str) -> int:
        """Blocks in this request's table; 0 for an unknown request."""
        ...

    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        ...

    def evict_token_range(self, request_id: str, start: int, end: int) -> tuple[int, int, int]:
        """Evict the whole blocks inside ``[start, end)``; return ``(aligned_start, aligned_end, num_freed)``."""
        ...

    def keep_only(self, request_id: str, ordinals: Sequence[int]) -> int:
        """Take all blocks out of a live request's table but those at ``ordinals``; return how many were reclaimed."""
        ...

    def own_range(self, request_id: str, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Make the table's blocks ``[first, last)`` this request's alone; return the copies to make, (from, to)."""
        ...

    def withhold(self, request_id: str) -> None:
        """Publish no further block of this request in the prefix cache, until its blocks are released."""
        ...

    def release(self, request: Any) -> None:
        """Give back every block of a request that keeps living; its tokens must then be computed again."""
        ...


class RequestTokens(Protocol):
    """Edits of a resting request's per-token arrays. A module may satisfy it."""

    def make_private(self, request: Any, salt: str) -> None:
        """Give a request its own prefix-cache salt."""
        ...

    def drop_tail(self, request: Any, keep: int, block_size: int) -> None:
        """Cut a request's tokens to the first ``keep``; its reply becomes part of its prompt."""
        ...

    def cut_range(self, request: Any, freed: TokenRange, block_size: int) -> None:
        """Remove one block-aligned token range from every per-token array of a request."""
        ...

    def append_chunk(self, request: Any, update: Any) -> None:
        """Append a chunk's tokens and take over the chunk's own parameters."""
        ...

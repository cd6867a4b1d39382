"""What sessions need from an engine and from a log: implemented by adapters, and by fakes in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvpolicy.core.events import Event


class BlockTable(Protocol):
    """The block tables of an engine, of which whole blocks can be evicted while their request lives."""

    def evict_token_range(self, request_id: str, start: int, end: int) -> tuple[int, int, int]:
        """Evict the whole blocks inside ``[start, end)``; return ``(aligned_start, aligned_end, num_freed)``.

        The caller removes exactly the returned token range from its own arrays. An empty, inverted or
        sub-block range, or an unknown request, gives ``(start, start, 0)`` and changes nothing. ``num_freed``
        counts the blocks that were really reclaimed: one that another request shares leaves this table only.
        """
        ...

    def num_blocks(self, request_id: str) -> int:
        """Return the blocks in this request's table; 0 for an unknown request."""
        ...

    def num_free_blocks(self) -> int:
        """Return the blocks that can be allocated now."""
        ...


class EventSink(Protocol):
    """Where events go."""

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...

"""What happened to sessions, as values: the core and its users report these, adapters log them.

Each event's ``name`` is a constant, a noun and a past verb, and its numbers carry their unit in their name.
"""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import asdict, frozen


@frozen(kw_only=True)
class Event:
    """Something that happened to the session ``request_id``."""

    name: ClassVar[str]

    request_id: str

    def fields(self) -> dict[str, Any]:
        """Return the event's values for a logger, by name.

        >>> SessionClosed(request_id="a", num_chunks=3).fields()
        {'request_id': 'a', 'num_chunks': 3}
        """
        return asdict(self, recurse=False)


@frozen(kw_only=True)
class SessionOpened(Event):
    """A session was admitted with a first chunk of ``num_tokens`` tokens."""

    name: ClassVar[str] = "session.opened"

    num_tokens: int


@frozen(kw_only=True)
class ChunkFolded(Event):
    """A chunk of ``num_tokens`` was taken in; the session holds ``num_resident_tokens`` with it."""

    name: ClassVar[str] = "chunk.folded"

    num_tokens: int
    num_resident_tokens: int
    num_evicted_tokens: int


@frozen(kw_only=True)
class RangeEvicted(Event):
    """The tokens ``[start, end)`` left the session; ``num_blocks`` were really reclaimed."""

    name: ClassVar[str] = "range.evicted"

    start: int
    end: int
    num_blocks: int


@frozen(kw_only=True)
class SessionConsolidated(Event):
    """The ``num_tokens`` tokens of the window are set to be computed again from position 0."""

    name: ClassVar[str] = "session.consolidated"

    num_tokens: int


@frozen(kw_only=True)
class SessionParked(Event):
    """A session gave its ``num_blocks`` blocks back and keeps its tokens."""

    name: ClassVar[str] = "session.parked"

    num_blocks: int


@frozen(kw_only=True)
class SessionPreempted(Event):
    """The engine took the blocks of a running session."""

    name: ClassVar[str] = "session.preempted"


@frozen(kw_only=True)
class ChunkRefused(Event):
    """A chunk was not taken in; the session goes on without it, if it has not ended (``session_ended``)."""

    name: ClassVar[str] = "chunk.refused"

    code: str
    message: str


@frozen(kw_only=True)
class SessionFailed(Event):
    """A session was ended with an error."""

    name: ClassVar[str] = "session.failed"

    code: str
    message: str


@frozen(kw_only=True)
class SessionClosed(Event):
    """A session of ``num_chunks`` chunks is gone and everything it held is freed."""

    name: ClassVar[str] = "session.closed"

    num_chunks: int

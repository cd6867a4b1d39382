"""The account of one session: its segments, the drift between positions and indices, and its counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from kvpolicy.core.checks import instance_errors, integer_errors, reject
from kvpolicy.core.counts import SessionCounts
from kvpolicy.core.errors import InvariantError, PolicyUsageError
from kvpolicy.core.positions import PositionMap
from kvpolicy.core.segments import SegmentKind, SegmentLog
from kvpolicy.core.spaces import LogicalPosition, TokenRange

if TYPE_CHECKING:
    from kvpolicy.core.victims import Victims


@frozen(kw_only=True)
class SessionLedger:
    """Everything the core knows of a session. Immutable: every operation returns a new ledger.

    ``evicted_width`` is the number of tokens evicted since positions last started from 0; ``watermark`` the
    highest position whose K is cached, as far as a fold has seen it (-1: none). Every new token gets a
    position above the watermark.
    """

    log: SegmentLog
    num_chunks: int
    evicted_width: int = 0
    watermark: int = -1
    counts: SessionCounts = field(factory=SessionCounts)

    def __attrs_post_init__(self) -> None:
        reject(integer_errors("ledger.num_chunks", self.num_chunks, 0))
        reject(integer_errors("ledger.evicted_width", self.evicted_width, 0))
        reject(instance_errors("ledger.counts", self.counts, SessionCounts))
        reject(integer_errors("ledger.watermark", self.watermark, -1))
        if self.watermark >= self.next_position:
            raise PolicyUsageError(
                f"ledger.watermark: expected less than {self.next_position} (next_position), got {self.watermark}"
            )

    @classmethod
    def opened(cls, num_tokens: int, *, anchor_tokens: int | None = None, media: tuple[str, ...] = ()) -> SessionLedger:
        """Return the ledger of a session that starts with a chunk of ``num_tokens`` tokens.

        Its first ``anchor_tokens`` (all, if None or more than there are) are pinned; the rest is ordinary
        content, which the media then belong to.

        Raises:
            PolicyUsageError: the chunk is empty, or an argument is not a count.
        """
        reject(integer_errors("num_tokens", num_tokens, 1))
        reject(integer_errors("anchor_tokens", anchor_tokens, 1, optional=True))
        num_pinned = min(anchor_tokens or num_tokens, num_tokens)
        has_rest = num_pinned < num_tokens
        log = SegmentLog().append(SegmentKind.ANCHOR, num_pinned, pinned=True, media=() if has_rest else media)
        log = log.append(SegmentKind.CONTENT, num_tokens - num_pinned, media=media)
        return cls(log=log, num_chunks=1)

    def reply_closed(self, keep: int) -> SessionLedger:
        """Return the ledger after a reply: its segment is what was computed beyond the known tokens.

        Raises:
            InvariantError: fewer tokens are kept than the ledger knows of.
        """
        if keep < self.num_tokens:
            raise InvariantError(f"keep: expected an integer >= {self.num_tokens} (tokens in the ledger), got {keep}")
        log = self.log.append(SegmentKind.REPLY, keep - self.num_tokens)
        return evolve(self, log=log, watermark=max(self.watermark, keep - 1 + self.evicted_width))

    def evicted(self, victims: Victims, freed: TokenRange) -> SessionLedger:
        """Return the ledger after an eviction that really freed the tokens ``freed``.

        Raises:
            InvariantError: the victims or the freed tokens are impossible (see ``SegmentLog.evict``).
        """
        return evolve(
            self,
            log=self.log.evict(victims.indices, freed),
            evicted_width=self.evicted_width + freed.width,
            counts=self.counts.with_eviction(freed.width),
        )

    def appended(self, num_tokens: int, media: tuple[str, ...] = ()) -> SessionLedger:
        """Return the ledger with one more chunk."""
        log = self.log.append(SegmentKind.CONTENT, num_tokens, media=media)
        return evolve(self, log=log, num_chunks=self.num_chunks + 1)

    def withdrawn(self) -> SessionLedger:
        """Return the ledger without the chunk that was appended last, of which nothing has been computed.

        Raises:
            InvariantError: there is no such chunk.
        """
        return evolve(self, log=self.log.without_last(), num_chunks=self.num_chunks - 1)

    def consolidated(self) -> SessionLedger:
        """Return the ledger after its tokens were set to be computed again from position 0."""
        return evolve(self.preempted(), counts=self.counts.with_consolidation())

    def parked(self) -> SessionLedger:
        """Return the ledger after its blocks were freed; its tokens are computed again later."""
        return evolve(self.preempted(), counts=self.counts.with_park())

    def preempted(self) -> SessionLedger:
        """Return the ledger after the engine took its blocks: nothing is cached."""
        return evolve(self, evicted_width=0, watermark=-1)

    @property
    def num_tokens(self) -> int:
        """Tokens in the session, residue included."""
        return self.log.num_tokens

    @property
    def positions(self) -> PositionMap:
        """How indices map to positions now."""
        return PositionMap(rope_shift=self.evicted_width)

    @property
    def next_position(self) -> LogicalPosition:
        """Position of the next token."""
        return LogicalPosition(self.num_tokens + self.evicted_width)

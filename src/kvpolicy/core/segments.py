"""A session's tokens as segments: the pinned anchor, content (a frame, a text turn) and replies.

The segments of a log are sorted and disjoint, but need not cover it: only whole blocks are ever freed, so an
eviction can leave edge tokens behind that no segment owns. They are called unowned residue and go with the
next eviction that reaches them.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from kvpolicy.core.checks import instance_errors, integer_errors, media_errors, reject
from kvpolicy.core.errors import InvariantError, PolicyUsageError
from kvpolicy.core.spaces import TokenRange

if TYPE_CHECKING:
    from collections.abc import Iterable


class SegmentKind(Enum):
    """What the tokens of a segment are."""

    ANCHOR = "anchor"
    CONTENT = "content"
    REPLY = "reply"


@frozen
class Segment:
    """Tokens ``[start, end)`` with one role; at least one.

    A ``pinned`` segment is never evicted; ``media`` names the multimodal features whose placeholders lie in it.
    """

    kind: SegmentKind
    start: int
    end: int
    pinned: bool = field(default=False, kw_only=True)
    media: tuple[str, ...] = field(default=(), kw_only=True)

    def __attrs_post_init__(self) -> None:
        reject(instance_errors("segment.kind", self.kind, SegmentKind))
        reject(instance_errors("segment.pinned", self.pinned, bool))
        reject(integer_errors("segment.start", self.start, 0))
        reject(integer_errors("segment.end", self.end, self.start + 1, because="start + 1"))
        reject(media_errors("segment.media", self.media))

    @property
    def width(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    @property
    def is_text(self) -> bool:
        """Whether no media belong to it."""
        return not self.media


@frozen
class SegmentLog:
    """The segments of a session with ``num_tokens`` tokens. Immutable: every operation returns a new log."""

    segments: tuple[Segment, ...] = ()
    num_tokens: int = 0

    def __attrs_post_init__(self) -> None:
        reject(integer_errors("log.num_tokens", self.num_tokens, 0))
        reject(instance_errors("log.segments", self.segments, tuple))
        reached = 0
        for segment in self.segments:
            if segment.start < reached:
                raise PolicyUsageError(
                    f"log.segments: expected sorted and disjoint ones, got {segment} after token {reached}"
                )
            reached = segment.end
        if reached > self.num_tokens:
            raise PolicyUsageError(
                f"log.segments: expected all within {self.num_tokens} (num_tokens), got one up to {reached}"
            )

    def append(self, kind: SegmentKind, width: int, *, pinned: bool = False, media: tuple[str, ...] = ()) -> SegmentLog:
        """Return the log with one more segment of ``width`` tokens at its end (itself for width 0)."""
        reject(integer_errors("width", width, 0))
        if width == 0:
            return self
        end = self.num_tokens + width
        segment = Segment(kind, self.num_tokens, end, pinned=pinned, media=media)
        return SegmentLog((*self.segments, segment), end)

    def without_last(self) -> SegmentLog:
        """Return the log without its last segment.

        Raises:
            InvariantError: there is none, it is pinned, or it is not at the end.
        """
        last = self.segments[-1] if self.segments else None
        if last is None or last.pinned or last.end != self.num_tokens:
            raise InvariantError(f"log: expected an unpinned last segment up to {self.num_tokens}, got {last}")
        return SegmentLog(self.segments[:-1], last.start)

    def extent(self, index: int) -> TokenRange:
        """Return what goes with a segment: its tokens and the unowned ones before it.

        What is behind the last segment goes with it, too. With segments [0, 10) and [14, 40) of 45 tokens,
        the second one's extent is [10, 45).
        """
        before = self.segments[index - 1].end if index > 0 else 0
        is_last = index == len(self.segments) - 1
        return TokenRange(before, self.num_tokens if is_last else self.segments[index].end)

    def span_of(self, first: int, last: int) -> TokenRange:
        """Return the joint extent of the neighbouring segments ``first`` to ``last - 1``."""
        return TokenRange(self.extent(first).start, self.extent(last - 1).end)

    def evict(self, victims: range, freed: TokenRange) -> SegmentLog:
        """Return the log without the victims (segment indices) and without the freed tokens.

        What the victims leave behind (``freed`` is whole blocks, the victims seldom are) goes to the segment
        after them, else to the unpinned one before them, else to nobody. Their media are gone whole and never
        move to a neighbour.

        With an anchor [0, 10), content [10, 50) and a reply [50, 60), evicting the content frees [16, 48) in
        blocks of 16; tokens 10 to 15, 48 and 49 become the reply's, which is [10, 28) then.

        Raises:
            InvariantError: a victim is pinned or does not exist, or the freed tokens are none or not theirs.
        """
        self._check_victims(victims, freed)
        before, after = self.segments[: victims.start], self.segments[victims.stop :]
        own = self.span_of(victims.start, victims.stop)
        num_left = own.width - freed.width
        moved = [evolve(s, start=s.start - freed.width, end=s.end - freed.width) for s in after]
        if num_left and moved and not moved[0].pinned:
            moved[0] = evolve(moved[0], start=own.start)
        elif num_left and before and not before[-1].pinned:
            before = (*before[:-1], evolve(before[-1], end=own.start + num_left))
        return SegmentLog((*before, *moved), self.num_tokens - freed.width)

    def _check_victims(self, victims: range, freed: TokenRange) -> None:
        exist = victims.step == 1 and 0 <= victims.start < victims.stop <= len(self.segments)
        if not exist:
            raise InvariantError(f"victims: expected neighbours among {len(self.segments)} segments, got {victims}")
        if any(segment.pinned for segment in self.segments[victims.start : victims.stop]):
            raise InvariantError(f"victims: expected unpinned segments, got {victims} of {self.segments}")
        own = self.span_of(victims.start, victims.stop)
        if freed.is_empty or not own.contains(freed):
            raise InvariantError(f"freed: expected at least one token, all inside {own}, got {freed}")

    @property
    def num_pinned(self) -> int:
        """Tokens in pinned segments."""
        return _total(segment for segment in self.segments if segment.pinned)

    @property
    def num_content(self) -> int:
        """Content segments that may be evicted."""
        return sum(segment.kind is SegmentKind.CONTENT and not segment.pinned for segment in self.segments)

    @property
    def num_text_tokens(self) -> int:
        """Tokens in segments without media that may be evicted."""
        return _total(segment for segment in self.segments if segment.is_text and not segment.pinned)


def _total(segments: Iterable[Segment]) -> int:
    return sum(segment.width for segment in segments)

"""Which segments go next: the oldest that may, with neighbours until at least one whole block comes free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from kvpolicy.core.checks import integer_errors, reject
from kvpolicy.core.spaces import TokenRange, align_inward

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpolicy.core.segments import Segment, SegmentLog


@frozen(kw_only=True)
class Victims:
    """Segments ``first`` to ``last - 1`` of a log and the block-aligned tokens that come free with them."""

    first: int
    last: int
    freed: TokenRange

    def __attrs_post_init__(self) -> None:
        reject(integer_errors("victims.first", self.first, 0))
        reject(integer_errors("victims.last", self.last, self.first + 1, because="first + 1"))

    @property
    def indices(self) -> range:
        """The segments' indices in the log that they were chosen from."""
        return range(self.first, self.last)


def oldest_victims(
    log: SegmentLog,
    block_size: int,
    *,
    eligible: Callable[[Segment], bool],
    neighbours: Callable[[Segment], bool],
) -> Victims | None:
    """Return the next segments to evict, or None if nothing that may go frees a whole block.

    The oldest eligible segment is tried first. If it frees no whole block, the segments after it are packed
    with it, one by one, then those before it; pinned ones never, and none that ``neighbours`` turns down. If
    that does not free a block either, the next eligible segment is tried. Pure.

    With an anchor [0, 10), content [10, 20), a reply [20, 30) and content [30, 50) in blocks of 16: the first
    content frees nothing, with the reply neither ([10, 30) holds no whole block), with the second content
    [16, 48) goes.

    Args:
        log: the segments.
        block_size: tokens in one block.
        eligible: whether an eviction may begin at this segment (pinned ones are not asked about).
        neighbours: whether this segment may be packed with the victim (likewise).
    """
    for index, segment in enumerate(log.segments):
        if not segment.pinned and eligible(segment):
            victims = _packed(log, block_size, index, neighbours)
            if victims is not None:
                return victims
    return None


def _packed(log: SegmentLog, block_size: int, index: int, neighbours: Callable[[Segment], bool]) -> Victims | None:
    """Return the segment at ``index`` with as few neighbours as free a whole block, None if none is freed."""

    def may_join(index: int) -> bool:
        if not 0 <= index < len(log.segments):
            return False
        segment = log.segments[index]
        return not segment.pinned and neighbours(segment)

    first, last = index, index + 1
    while (span := align_inward(log.span_of(first, last), block_size)).is_empty:
        if may_join(last):
            last += 1
        elif may_join(first - 1):
            first -= 1
        else:
            return None
    return Victims(first=first, last=last, freed=span.tokens)

"""What an event does to the cells of a KV head: the reference that every executor equals bit for bit.

Cells are numbered by KV index. With P entries held, e to drop, a prompt of p and the newest r protected, the
candidates are the cells ``[p, P - r)``, and a candidate's ordinal counts from p. After the event the cells
``[0, P - e)`` are held: survivors in the last e cells were moved into the holes below. This is sound because
attention over a decode query does not depend on the order of the cached entries (K carries its rotation), given
what an adapter has to make sure of: full causal attention, no ALiBi, no sliding window, the whole prompt
cached, and since the last event at least r entries appended, so that the newest r are at the end.

Application contract: sources lie in the last e cells and destinations below them, so moves may be applied in
any order, without scratch memory, and twice: the second time changes nothing. That holds until a source cell
is written to again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from kvpolicy.core.checks import integer_errors, is_integer, reject
from kvpolicy.core.draws import BlockDraw, Draw, RingDraw, UniformDraw, draw_errors
from kvpolicy.core.errors import InvariantError, PolicyUsageError
from kvpolicy.core.philox import WORD_LIMIT, Key, philox4x32
from kvpolicy.core.spaces import BlockSpan, KVIndex, LogicalPosition, TokenRange, align_inward, blocks_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ORDINAL_BITS = 20
"""An ordinal fits into so many bits: priority and ordinal make one number of 52, and so sort without ties."""

_WORDS_PER_CALL = 4


@frozen(kw_only=True)
class CompactionEvent:
    """One application of a policy to one request, in a size that does not depend on the request's.

    Scheduler and workers expand the same event to the same result, so nothing else crosses a process boundary.

    Attributes:
        key: the request's random key (``philox.key_of``).
        ordinal: the events of this request before this one.
        prompt_length: entries of the prompt, none of which goes.
        physical_length: entries held before the event, per KV head.
        num_dropped: entries to drop, per KV head.
        num_protected: the newest entries, none of which goes.
        draw: how those that go are chosen.
    """

    key: Key
    ordinal: int
    prompt_length: int
    physical_length: int
    num_dropped: int
    num_protected: int
    draw: Draw

    def __attrs_post_init__(self) -> None:
        reject(_key_errors(self.key))
        reject(
            _word_errors("event.ordinal", self.ordinal)
            + integer_errors("event.prompt_length", self.prompt_length, 1)
            + integer_errors("event.num_protected", self.num_protected, 0)
            + integer_errors("event.num_dropped", self.num_dropped, 0)
            + draw_errors(self.draw)
        )
        kept = self.prompt_length + self.num_protected
        reject(
            integer_errors("event.physical_length", self.physical_length, kept, because="prompt_length + num_protected")
        )
        reject(_size_errors(self))

    @property
    def candidates(self) -> TokenRange:
        """The cells of which some go.

        >>> CompactionEvent(key=(0, 0), ordinal=1, prompt_length=5, physical_length=16, num_dropped=4,
        ...     num_protected=4, draw=UniformDraw()).candidates
        TokenRange(start=5, end=12)
        """
        return TokenRange(self.prompt_length, self.physical_length - self.num_protected)

    @property
    def length_after(self) -> int:
        """Entries held after the event, per KV head."""
        return self.physical_length - self.num_dropped


@frozen
class Move:
    """A survivor's way: the entry at KV index ``source`` is copied to KV index ``destination``."""

    source: KVIndex
    destination: KVIndex


@frozen(kw_only=True)
class HeadPlan:
    """What an event does to one KV head of one layer.

    ``dropped`` are the cells whose entries go, ascending. ``moves`` are the copies, sources ascending. There
    are none for a ``BlockDraw``: the dropped blocks leave the table, and those behind them close up.
    """

    dropped: tuple[KVIndex, ...] = ()
    moves: tuple[Move, ...] = ()


def expand(event: CompactionEvent, layer: int, kv_head: int) -> HeadPlan:
    """Return the plan for one KV head; ``layer`` and ``kv_head`` count over the whole model. Pure.

    Budget 8, buffer 4, prompt 5, at 16 entries: the ring's candidates are the cells 5 to 11. From the ordinal 5
    on, the cells 10, 11, 5 and 6 go, in this order, and get what is in the last four.

    >>> event = CompactionEvent(key=(0, 0), ordinal=3, prompt_length=5, physical_length=16, num_dropped=4,
    ...     num_protected=4, draw=RingDraw(5))
    >>> plan = expand(event, layer=0, kv_head=0)
    >>> plan.dropped
    (5, 6, 10, 11)
    >>> [(move.source, move.destination) for move in plan.moves]
    [(12, 10), (13, 11), (14, 5), (15, 6)]

    Raises:
        PolicyUsageError: layer or KV head is no word.
    """
    reject(_word_errors("layer", layer) + _word_errors("kv_head", kv_head))
    draw = event.draw
    if isinstance(draw, RingDraw):
        width = event.candidates.width
        ring = [(draw.start + step) % width for step in range(event.num_dropped)]
        return _relocated(event, ring)
    if isinstance(draw, UniformDraw):
        stream = (0, 0) if draw.is_shared else (layer, kv_head)
        return _relocated(event, sorted(_smallest(event, stream, event.candidates.width, event.num_dropped)))
    size = draw.block_size
    cells = (block * size + offset for block in _dropped_blocks(event, draw) for offset in range(size))
    return HeadPlan(dropped=tuple(KVIndex(cell) for cell in cells))


def surviving_blocks(event: CompactionEvent, block_size: int) -> tuple[int, ...]:
    """Return which blocks of the request's table stay, as indices into the table before the event, ascending.

    A ``BlockDraw`` takes whole blocks out of the table; after the other draws the held entries lie in its first
    blocks. Pure, and the same for all layers and heads. Blocks of 4, a prompt of 5, at 16 entries:

    >>> event = CompactionEvent(key=(0, 0), ordinal=3, prompt_length=5, physical_length=16, num_dropped=4,
    ...     num_protected=4, draw=RingDraw(5))
    >>> surviving_blocks(event, 4)
    (0, 1, 2)
    >>> import attrs
    >>> surviving_blocks(attrs.evolve(event, draw=BlockDraw(4)), 4)  # only block 2 lies wholly in the cells 5 to 11
    (0, 1, 3)

    Args:
        event: what is applied.
        block_size: of the request's table, in entries.

    Raises:
        PolicyUsageError: the block size is no size, or another one than that of the event's ``BlockDraw``.
    """
    reject(integer_errors("block_size", block_size, 1))
    if not isinstance(event.draw, BlockDraw):
        return tuple(range(blocks_for(event.length_after, block_size)))
    if event.draw.block_size != block_size:
        raise PolicyUsageError(
            f"block_size: expected {event.draw.block_size} (event.draw.block_size), got {block_size}; a policy takes "
            "the size of its blocks from the snapshot"
        )
    dropped = set(_dropped_blocks(event, event.draw))
    return tuple(block for block in range(blocks_for(event.physical_length, block_size)) if block not in dropped)


def retained_positions(
    event: CompactionEvent, plan: HeadPlan, history: Sequence[LogicalPosition]
) -> tuple[LogicalPosition, ...]:
    """Return the logical positions that a head holds after an event, by KV index.

    ``history`` are those before it. With prompt 1, five entries and cell 1 dropped, the last one fills the hole:

    >>> event = CompactionEvent(key=(0, 0), ordinal=0, prompt_length=1, physical_length=5, num_dropped=1,
    ...     num_protected=2, draw=RingDraw(0))
    >>> retained_positions(event, expand(event, 0, 0), range(5))
    (0, 4, 2, 3)

    Raises:
        InvariantError: the history is not as long as the event says.
    """
    if len(history) != event.physical_length:
        raise InvariantError(f"history: expected {event.physical_length} positions, got {len(history)}")
    cells: list[LogicalPosition] = list(history)
    vacated = set(plan.dropped)
    for move in plan.moves:
        cells[move.destination] = cells[move.source]
        vacated.add(move.source)
        vacated.discard(move.destination)
    return tuple(position for index, position in enumerate(cells) if index not in vacated)


def _relocated(event: CompactionEvent, ordinals: Iterable[int]) -> HeadPlan:
    """Return the plan that drops candidates and fills their holes in the given order."""
    dropped = [KVIndex(event.prompt_length + ordinal) for ordinal in ordinals]
    gone = set(dropped)
    holes = (cell for cell in dropped if cell < event.length_after)
    sources = (KVIndex(cell) for cell in range(event.length_after, event.physical_length) if cell not in gone)
    return HeadPlan(
        dropped=tuple(sorted(dropped)),
        moves=tuple(Move(source, hole) for source, hole in zip(sources, holes, strict=True)),
    )


def _smallest(event: CompactionEvent, stream: tuple[int, int], num_candidates: int, num_dropped: int) -> list[int]:
    """Return the ordinals with the smallest (priority, ordinal).

    A priority is 32 bits, so ties do occur; the ordinal below it settles them the same way everywhere.
    """
    ranked = (
        (word << ORDINAL_BITS) | ordinal for ordinal, word in enumerate(_priorities(event, stream, num_candidates))
    )
    mask = (1 << ORDINAL_BITS) - 1
    return [rank & mask for rank in sorted(ranked)[:num_dropped]]


def _priorities(event: CompactionEvent, stream: tuple[int, int], num_candidates: int) -> Iterator[int]:
    """Yield one word per candidate. A call serves four of them; what the last one has left over is unused."""
    for first in range(0, num_candidates, _WORDS_PER_CALL):
        words = philox4x32((first // _WORDS_PER_CALL, event.ordinal, *stream), event.key)
        yield from words[: num_candidates - first]


def _dropped_blocks(event: CompactionEvent, draw: BlockDraw) -> list[int]:
    """Return the blocks that go, counted from the beginning of the request's table, ascending."""
    blocks = _whole_blocks(event, draw)
    chosen = _smallest(event, (0, 0), blocks.num_blocks, event.num_dropped // draw.block_size)
    return sorted(blocks.first + ordinal for ordinal in chosen)


def _whole_blocks(event: CompactionEvent, draw: BlockDraw) -> BlockSpan:
    """Return the blocks that hold nothing but candidates."""
    return align_inward(event.candidates, draw.block_size)


def _key_errors(key: object) -> tuple[str, ...]:
    match key:
        case (low, high) if isinstance(key, tuple) and not _word_errors("", low) + _word_errors("", high):
            return ()
        case _:
            return (f"event.key: expected a tuple of two integers from 0 to 2**32 - 1, got {key!r}",)


def _word_errors(name: str, value: object) -> tuple[str, ...]:
    if is_integer(value) and 0 <= value < WORD_LIMIT:
        return ()
    return (f"{name}: expected an integer from 0 to 2**32 - 1, got {value!r}",)


def _size_errors(event: CompactionEvent) -> tuple[str, ...]:
    """Return what is wrong with the number of candidates, and with how many of them are to go."""
    width, limit = event.candidates.width, 1 << ORDINAL_BITS
    if width > limit:
        return (f"event: expected at most {limit} candidates, got {width}",)
    if isinstance(event.draw, BlockDraw):
        blocks, size = _whole_blocks(event, event.draw), event.draw.block_size
        if event.num_dropped % size or event.num_dropped > blocks.num_blocks * size:
            expected = f"at most {blocks.num_blocks} whole blocks of {size}"
            return (f"event.num_dropped: expected {expected}, got {event.num_dropped} entries",)
    if event.num_dropped > width:
        return (f"event.num_dropped: expected at most {width} (the candidates), got {event.num_dropped}",)
    return ()

"""How an event chooses what to drop: a closed set of three, because every executor implements each of them.

A policy picks one and sets its parameters. A draw is a value; what it means is in ``kvpolicy.core.compaction``.
"""

from __future__ import annotations

from typing import get_args

from attrs import frozen

from kvpolicy.core.checks import integer_errors, reject
from kvpolicy.core.errors import PolicyUsageError


@frozen(kw_only=True)
class UniformDraw:
    """Any set of candidates is equally likely: a fresh draw per layer and KV head, or one that all share."""

    is_shared: bool = False

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.is_shared, bool):
            raise PolicyUsageError(f"draw.is_shared: expected True or False, got {self.is_shared!r}")


@frozen
class RingDraw:
    """The candidates are a ring, in every head: those from the ordinal ``start`` on go, round its end.

    Holes are filled in ring order too. So if each event starts where the last one ended, the ring holds the
    newest entries, as a window does; filled in ascending order it would break at the first wrap.
    """

    start: int

    def __attrs_post_init__(self) -> None:
        reject(integer_errors("draw.start", self.start, 0))


@frozen
class BlockDraw:
    """Any set of whole blocks of ``block_size`` candidates is equally likely, the same one in every head."""

    block_size: int

    def __attrs_post_init__(self) -> None:
        reject(integer_errors("draw.block_size", self.block_size, 1))


Draw = UniformDraw | RingDraw | BlockDraw
"""One of the closed set."""


def draw_errors(draw: object) -> tuple[str, ...]:
    """Return the complaint about an argument that must be a draw; empty if it is one."""
    if isinstance(draw, Draw):
        return ()
    names = ", ".join(kind.__name__ for kind in get_args(Draw))
    return (f"event.draw: expected one of {names}, got {draw!r}",)

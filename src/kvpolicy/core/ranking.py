"""Which idle sessions to park when blocks are short."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import field, frozen

from kvpolicy.core.checks import instance_errors, integer_errors, is_integer, is_number, reject
from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Iterable


@frozen
class IdleSession:
    """A session that could be parked.

    ``priority`` is the engine's number (in vLLM, smaller is more important), ``idle_s`` seconds since its
    last reply. ``holds_slot`` is False for one whose next chunk waits to be computed: it holds blocks only.
    """

    request_id: str
    priority: int = field(kw_only=True)
    idle_s: float = field(kw_only=True)
    num_blocks: int = field(kw_only=True)
    holds_slot: bool = field(default=True, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not is_integer(self.priority):
            raise PolicyUsageError(f"session.priority: expected an integer, got {self.priority!r}")
        if not is_number(self.idle_s) or not 0 <= self.idle_s < math.inf:
            raise PolicyUsageError(f"session.idle_s: expected a finite number >= 0, got {self.idle_s!r}")
        reject(integer_errors("session.num_blocks", self.num_blocks, 0))
        reject(instance_errors("session.holds_slot", self.holds_slot, bool))


def rank_idle_sessions(sessions: Iterable[IdleSession], need: int) -> tuple[IdleSession, ...]:
    """Return the sessions to park, in order: as few as the order allows so that ``need`` blocks come free.

    The order: least important first (larger priority value), then idle longest, then most blocks, then
    request id, so that it never depends on how they are passed. Empty if nothing is needed, or if all of them
    together hold too few blocks: parking that cannot help is not done. For the same reason a session without
    blocks is never among them.

    With blocks a: 4 (priority 0, idle 9 s), b: 3 (priority 1, idle 1 s), c: 5 (priority 0, idle 2 s), and 6
    needed, b goes first, then a: 7 blocks.
    """
    if need <= 0:
        return ()
    num_blocks = 0
    chosen: list[IdleSession] = []
    for session in sorted((s for s in sessions if s.num_blocks), key=_by_value):
        chosen.append(session)
        num_blocks += session.num_blocks
        if num_blocks >= need:
            return tuple(chosen)
    return ()


def _by_value(session: IdleSession) -> tuple[int, float, int, str]:
    return -session.priority, -session.idle_s, -session.num_blocks, session.request_id

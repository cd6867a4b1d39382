"""Who is parked, and why: what the scheduler knows before a step, and the plan that follows from it. Pure.

The rules:

- The request that the engine will try first (the head of its queue) gets the blocks and the slot that it lacks, if
  parking can give it both. Running requests come before it: their growth is part of what it has to wait for.
- Where nothing helps the head, the running requests still get the blocks that they lack, before the engine preempts
  one of them.
- As few sessions go as their order allows (see ``rank_idle_sessions``), and none if that helps nobody.
- A consolidation ahead of time makes nobody give anything up. Where it is the head and does not fit, it is given up
  itself: its session is parked, and the next chunk does its work.

Who waits never holds on to anything: besides idle sessions, those whose next chunk waits behind the head are up for
parking. So a head that gets nothing waits for running requests alone, and those end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from kvpolicy.core.checks import instance_errors, integer_errors, reject
from kvpolicy.core.ranking import rank_idle_sessions

if TYPE_CHECKING:
    from kvpolicy.core.ranking import IdleSession


@frozen
class WaitingHead:
    """The request that the engine will try to schedule first.

    Attributes:
        request_id: its id.
        num_lacking_blocks: blocks that it needs beyond those it holds, with what the engine keeps free beside it.
        num_shared_blocks: those of them that it will find in the prefix cache and that others hold already.
        consolidates: whether it is a session that is consolidated ahead of time.
    """

    request_id: str
    num_lacking_blocks: int = field(kw_only=True)
    num_shared_blocks: int = field(default=0, kw_only=True)
    consolidates: bool = field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        reject(
            integer_errors("head.num_lacking_blocks", self.num_lacking_blocks, 0)
            + integer_errors("head.num_shared_blocks", self.num_shared_blocks, 0)
            + instance_errors("head.consolidates", self.consolidates, bool)
        )


@frozen(kw_only=True)
class Pressure:
    """What the scheduler knows before a step.

    Attributes:
        num_free_blocks: blocks that can be allocated.
        num_growth_blocks: blocks that the running requests need beyond those they hold.
        has_free_slot: whether another request may run.
        head: the first waiting request, None if none waits.
        sessions: those that may be parked, in any order; the head is none of them.
    """

    num_free_blocks: int
    num_growth_blocks: int
    has_free_slot: bool
    head: WaitingHead | None
    sessions: tuple[IdleSession, ...]

    def __attrs_post_init__(self) -> None:
        reject(
            integer_errors("pressure.num_free_blocks", self.num_free_blocks, 0)
            + integer_errors("pressure.num_growth_blocks", self.num_growth_blocks, 0)
            + instance_errors("pressure.has_free_slot", self.has_free_slot, bool)
            + instance_errors("pressure.sessions", self.sessions, tuple)
        )

    @property
    def missing_for_running(self) -> int:
        """Blocks that the running requests lack beyond the free ones; 0 or less if none."""
        return self.num_growth_blocks - self.num_free_blocks

    @property
    def missing_for_head(self) -> int:
        """Blocks that the running requests and the head lack beyond the free ones; 0 or less if none."""
        if self.head is None:
            return self.missing_for_running
        return self.missing_for_running + self.head.num_lacking_blocks - self.head.num_shared_blocks

    def with_shared(self, num_blocks: int) -> Pressure:
        """Return the snapshot with ``num_blocks`` of the head's blocks found in the prefix cache.

        For schedulers that look them up only where they may decide: if without them ``missing_for_head`` is above 0.
        """
        return self if self.head is None else evolve(self, head=evolve(self.head, num_shared_blocks=num_blocks))


@frozen
class ParkingPlan:
    """Sessions to park, in order, by request id; or the head whose consolidation is given up (then plan again)."""

    parked: tuple[str, ...] = ()
    given_up: str | None = None


def plan_parking(pressure: Pressure) -> ParkingPlan:
    """Return whom to park before the next step.

    With idle sessions a: 4 blocks and b: 3 blocks, of which b is less important, and w: 2 blocks, whose next chunk
    waits and which holds no slot, between the two:

    ==== ====== ==== ============== ======== ==================================================================
    free growth slot head           plan     because
    ==== ====== ==== ============== ======== ==================================================================
    5    1      yes  lacks 4        nobody   it fits: 5 blocks for 1 + 4
    2    1      yes  lacks 4        b        3 blocks are missing
    0    1      yes  lacks 4        b, w     5 are missing: b goes first, then w
    1    1      yes  lacks 10       nobody   10 are missing, and all of them together hold 9
    0    2      yes  lacks 9        b        nothing helps the head, but the running requests lack 2
    2    1      yes  lacks 9, has 6 b        8 are missing, but 6 are in the prefix cache, held by others
    5    1      no   lacks 4        b        there are blocks; b gives its slot up
    0    0      no   lacks 5        b, w     b goes for its slot, w for the other 2 blocks
    0    1      no   none waits     b        the running requests lack 1; nobody needs a slot
    0    0      yes  consolidates   given up it lacks 1 and takes nothing from others
    ==== ====== ==== ============== ======== ==================================================================
    """
    head = pressure.head
    if head is not None and head.consolidates:
        fits = pressure.missing_for_head <= 0 and pressure.has_free_slot
        return ParkingPlan() if fits else ParkingPlan(given_up=head.request_id)
    victims = _victims_for_head(pressure) or rank_idle_sessions(pressure.sessions, pressure.missing_for_running)
    return ParkingPlan(tuple(session.request_id for session in victims))


def _victims_for_head(pressure: Pressure) -> tuple[IdleSession, ...]:
    """Return who gives the head the slot and the blocks that it lacks, nobody if it lacks none or cannot have both."""
    slot: tuple[IdleSession, ...] = ()
    if pressure.head is not None and not pressure.has_free_slot:
        slot = rank_idle_sessions((s for s in pressure.sessions if s.holds_slot), 1)[:1]
        if not slot:
            return ()
    missing = pressure.missing_for_head - sum(session.num_blocks for session in slot)
    others = rank_idle_sessions((s for s in pressure.sessions if s not in slot), missing)
    return slot + others if others or missing <= 0 else ()

"""When a request is compacted and how long it is then: all of it follows from its logical length.

The logical length counts the entries that were ever stored, the physical length those that are held. An event
is due when a step is scheduled, before the next token is written. Nothing depends on how often somebody
looked, so a replay after a preemption, and both sides of an asynchronous step, see the same events.
"""

from __future__ import annotations

from attrs import asdict, frozen

from kvpolicy.core.checks import integer_errors, reject
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.spaces import blocks_for


@frozen(kw_only=True)
class EventSchedule:
    """The events of one request.

    Event i is due at logical length ``first_due + i * interval``. The first one drops ``first_dropped``
    entries per KV head, every later one the ``interval`` entries that came since.

    Budget 8, buffer 4, prompt 5: event 0 at 13 entries, of which one goes (12 stay); later ones at
    16 entries, of which 4 go.

    >>> schedule = token_schedule(budget=8, buffer_size=4, prompt_length=5)
    >>> [schedule.due_at(i) for i in range(3)]
    [13, 17, 21]
    >>> [schedule.length_before(i) for i in range(3)], [schedule.dropped_by(i) for i in range(3)]
    ([13, 16, 16], [1, 4, 4])
    """

    first_due: int
    interval: int
    first_dropped: int

    def __attrs_post_init__(self) -> None:
        reject(error for name, value in asdict(self).items() for error in integer_errors(f"schedule.{name}", value, 1))
        if self.first_dropped >= self.first_due:
            raise PolicyUsageError(
                f"schedule.first_dropped: expected less than {self.first_due} (first_due), got {self.first_dropped}"
            )

    @property
    def settled(self) -> int:
        """Physical length after any event."""
        return self.first_due - self.first_dropped

    @property
    def peak(self) -> int:
        """The largest physical length ever: the length that makes an event due.

        >>> [token_schedule(budget=8, buffer_size=r, prompt_length=5).peak for r in (0, 1, 4)]
        [9, 10, 16]
        """
        return max(self.first_due, self.settled + self.interval)

    def due_at(self, ordinal: int) -> int:
        """Return the logical length at which an event is due."""
        return self.first_due + ordinal * self.interval

    def dropped_by(self, ordinal: int) -> int:
        """Return the entries that an event drops per KV head."""
        return self.interval if ordinal else self.first_dropped

    def dropped_before(self, ordinal: int) -> int:
        """Return the entries that all earlier events dropped per KV head.

        >>> schedule = token_schedule(budget=8, buffer_size=4, prompt_length=5)
        >>> [schedule.dropped_before(i) for i in range(4)]
        [0, 1, 5, 9]
        """
        return self.first_dropped + (ordinal - 1) * self.interval if ordinal else 0

    def length_before(self, ordinal: int) -> int:
        """Return the physical length to which an event is applied."""
        return self.due_at(ordinal) - self.dropped_before(ordinal)

    def events_due_by(self, logical_length: int) -> int:
        """Return the number of events due up to and with a logical length.

        >>> schedule = token_schedule(budget=8, buffer_size=4, prompt_length=5)
        >>> [schedule.events_due_by(length) for length in (12, 13, 16, 17)]
        [0, 1, 1, 2]
        """
        return max(0, (logical_length - self.first_due) // self.interval + 1)

    def physical_length(self, logical_length: int) -> int:
        """Return the entries held once every event due by a logical length was applied.

        >>> schedule = token_schedule(budget=8, buffer_size=4, prompt_length=5)
        >>> [schedule.physical_length(length) for length in (12, 13, 16, 17)]
        [12, 12, 15, 12]
        """
        return logical_length - self.dropped_before(self.events_due_by(logical_length))


def token_schedule(*, budget: int, buffer_size: int, prompt_length: int) -> EventSchedule:
    """Return the schedule of a policy that drops single entries, with budget K and buffer r.

    The first event is due at K + r + 1 entries, the next after every r appended ones (at every append for
    r = 0). K + r stay; at most K + max(2r, 1) are held. With K = 2048 and r = 64: due at 2113, 2177, 2241, and so
    on; 2112 stay, at most 2176 are held.

    Raises:
        PolicyUsageError: a value is no such number, or the prompt does not fit into the budget.
    """
    _check(budget, buffer_size, prompt_length)
    settled = budget + buffer_size
    return EventSchedule(first_due=settled + 1, interval=max(buffer_size, 1), first_dropped=1)


def block_schedule(*, budget: int, buffer_size: int, prompt_length: int, block_size: int) -> EventSchedule:
    """Return the schedule of a policy that drops single whole blocks of generated entries.

    An event is due once the length exceeds K + r by a block, and one block lies wholly between the prompt and
    the newest r entries. Then both hold again after every ``block_size`` appended entries, so each event
    drops one block. At least K + r stay; at most K + r + 2 x block size - 1 are held. With K = 8, r = 4 and
    blocks of 4, a prompt of 5: block 2 is the first wholly generated one, and goes at 16 entries at the
    earliest, as 8 + 4 + 4 asks as well. With a prompt of 7 and K = 7 it is block 2 again: at 16, not at 15.

    >>> block_schedule(budget=7, buffer_size=4, prompt_length=7, block_size=4)
    EventSchedule(first_due=16, interval=4, first_dropped=4)

    Raises:
        PolicyUsageError: as ``token_schedule``.
    """
    _check(budget, buffer_size, prompt_length)
    reject(integer_errors("block_size", block_size, 1))
    first_block_end = (blocks_for(prompt_length, block_size) + 1) * block_size
    first_due = buffer_size + max(budget + block_size, first_block_end)
    return EventSchedule(first_due=first_due, interval=block_size, first_dropped=block_size)


def _check(budget: int, buffer_size: int, prompt_length: int) -> None:
    reject(
        integer_errors("budget", budget, 1)
        + integer_errors("buffer_size", buffer_size, 0)
        + integer_errors("prompt_length", prompt_length, 1)
    )
    if prompt_length > budget:
        raise PolicyUsageError(
            f"prompt: expected at most {budget} tokens (budget), got {prompt_length}; the prompt is always kept "
            "whole, so shorten it or raise the budget"
        )

"""The life of a session, as one table.

Rules, one per line of the table below:

- A session is idle or parked when its next chunk is folded; a chunk that arrives at another time waits
  outside.
- It is prefilling until the first token of the reply, and again after a preemption: its tokens are computed
  anew.
- A reply may stop before a token was seen (an empty reply).
- It consolidates only from idle, which has no chunk in it, and is idle again afterwards.
- It can be parked while idle, and unloaded while it waits to be prefilled (that changes no state). A
  consolidation that has not been computed yet can be parked as well: the next chunk's prefill does its work.
- Every live session can be closed; it is closed once everything it held is freed.
- A failure ends a session at any time.

Whatever is not in the table is a bug: ``next_state`` raises and nothing changes.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvpolicy.core.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Mapping


class SessionState(Enum):
    """Where a session is in its life."""

    OPENED = "opened"
    PREFILLING = "prefilling"
    REPLYING = "replying"
    IDLE = "idle"
    CONSOLIDATING = "consolidating"
    PARKED = "parked"
    CLOSING = "closing"
    CLOSED = "closed"


class SessionInput(Enum):
    """What can happen to a session."""

    CHUNK = "chunk"
    FIRST_TOKEN = "first_token"  # noqa: S105 - no password
    STOP = "stop"
    CONSOLIDATE = "consolidate"
    CONSOLIDATED = "consolidated"
    PARK = "park"
    PREEMPT = "preempt"
    CLOSE = "close"
    FREED = "freed"
    FAIL = "fail"


_S, _I = SessionState, SessionInput

_LIVE = (_S.OPENED, _S.PREFILLING, _S.REPLYING, _S.IDLE, _S.CONSOLIDATING, _S.PARKED)

TRANSITIONS: Mapping[tuple[SessionState, SessionInput], SessionState] = MappingProxyType(
    {
        (_S.OPENED, _I.CHUNK): _S.PREFILLING,
        (_S.IDLE, _I.CHUNK): _S.PREFILLING,
        (_S.PARKED, _I.CHUNK): _S.PREFILLING,
        (_S.PREFILLING, _I.FIRST_TOKEN): _S.REPLYING,
        (_S.REPLYING, _I.FIRST_TOKEN): _S.REPLYING,
        (_S.PREFILLING, _I.STOP): _S.IDLE,
        (_S.REPLYING, _I.STOP): _S.IDLE,
        (_S.PREFILLING, _I.PREEMPT): _S.PREFILLING,
        (_S.REPLYING, _I.PREEMPT): _S.PREFILLING,
        (_S.CONSOLIDATING, _I.PREEMPT): _S.CONSOLIDATING,
        (_S.IDLE, _I.CONSOLIDATE): _S.CONSOLIDATING,
        (_S.CONSOLIDATING, _I.CONSOLIDATED): _S.IDLE,
        (_S.IDLE, _I.PARK): _S.PARKED,
        (_S.PREFILLING, _I.PARK): _S.PREFILLING,
        (_S.CONSOLIDATING, _I.PARK): _S.PARKED,
        **{(state, _I.CLOSE): _S.CLOSING for state in _LIVE},
        (_S.CLOSING, _I.FREED): _S.CLOSED,
        **{(state, _I.FAIL): _S.CLOSED for state in (*_LIVE, _S.CLOSING)},
    }
)


def next_state(state: SessionState, event: SessionInput) -> SessionState:
    """Return the state after an input.

    Raises:
        InvariantError: that input cannot happen in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        possible = ", ".join(sorted(e.value for s, e in TRANSITIONS if s is state)) or "nothing"
        message = f"session: expected one of {possible} while {state.value}, got {event.value}"
        raise InvariantError(message) from None

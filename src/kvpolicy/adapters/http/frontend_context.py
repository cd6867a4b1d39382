"""What all sessions of one frontend share, and what is said in more than one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from kvpolicy.adapters.http.errors import ApiError, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpolicy.adapters.http.metrics import SessionMetrics
    from kvpolicy.adapters.http.settings import ServerSettings
    from kvpolicy.core.session_port import EnginePort


READING_A_FRAME = "frame: reading and decoding it"
NOTHING_PUSHED = "nothing was pushed, the session goes on"


@frozen(kw_only=True)
class Surroundings:
    """What all sessions of one frontend share."""

    engine: EnginePort
    settings: ServerSettings
    metrics: SessionMetrics
    clock: Callable[[], float]
    log: Any


def enqueue_deadline_passed(around: Surroundings, what: str, outcome: str) -> ApiError:
    """Count a request that came too slowly; return the answer to it: ``what`` took too long, and the ``outcome``."""
    around.metrics.timed_out("enqueue")
    limit_s = around.settings.enqueue_deadline_s
    return unavailable("enqueue_deadline", f"{what} took longer than {limit_s:g} s; {outcome}")


def engine_sentence(failure: str) -> str:
    """Return what is said of a dead engine."""
    return f"the engine has failed: {failure}"

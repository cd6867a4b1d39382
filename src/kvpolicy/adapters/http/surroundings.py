"""What all sessions of one frontend share, and what is said in more than one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from kvpolicy.adapters.http.errors import ApiError, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpolicy.adapters.http.metrics import SessionMetrics
    from kvpolicy.adapters.http.port import EnginePort
    from kvpolicy.adapters.http.settings import ServerSettings


@frozen(kw_only=True)
class Surroundings:
    """What all sessions of one frontend share."""

    engine: EnginePort
    settings: ServerSettings
    metrics: SessionMetrics
    clock: Callable[[], float]
    log: Any


def enqueue_deadline_passed(around: Surroundings) -> ApiError:
    """Count a chunk that came too slowly; return the answer to it."""
    around.metrics.timed_out("enqueue")
    limit_s = around.settings.enqueue_deadline_s
    message = f"frame: reading and decoding it took longer than {limit_s:g} s; nothing was pushed, the session goes on"
    return unavailable("enqueue_deadline", message)


def engine_sentence(failure: str) -> str:
    """Return what is said of a dead engine."""
    return f"the engine has failed: {failure}"

"""Where vLLM's load balancer has sent a session: all of its chunks go to the engine that holds it (R.9)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def rank_of(engine_core: Any, request_id: str) -> int | None:
    """Return the data-parallel rank that has a request, None where this front end has but one engine."""
    in_flight = getattr(engine_core, "reqs_in_flight", None)
    engine = in_flight.get(request_id) if in_flight else None
    return None if engine is None else int(engine_core.core_engines.index(engine))


@contextmanager
def counted_once(engine_core: Any, request_id: str) -> Iterator[None]:
    """Send a message in the block: that of a request that is counted already is not counted again.

    The balancer counts one more request in flight for every message that it sends, and one less when a request ends.
    """
    engine = (getattr(engine_core, "reqs_in_flight", None) or {}).get(request_id)
    try:
        yield
    finally:
        if engine is not None:
            engine_core.engine_inflight[engine] -= 1

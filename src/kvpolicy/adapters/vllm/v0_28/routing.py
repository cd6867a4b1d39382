"""Where vLLM's load balancer has sent a session: all of its chunks go to the engine that holds it (R.9)."""

from __future__ import annotations

from typing import Any


def sent_to(engine_core: Any, request_id: str, *, is_later: bool) -> int | None:
    """Return the data-parallel rank that a message was sent to, None where this front end has but one engine.

    The balancer counts one more request in flight for every message and one less for every request that ends. A
    message that is not its session's first (``is_later``) is no request of its own: what was counted is taken back.
    """
    in_flight = getattr(engine_core, "reqs_in_flight", None)
    engine = in_flight.get(request_id) if in_flight else None
    if engine is None:
        return None
    if is_later:
        engine_core.engine_inflight[engine] -= 1
    return int(engine_core.core_engines.index(engine))

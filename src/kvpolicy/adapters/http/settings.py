"""Every limit of the session frontend, with its default."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import frozen

from kvpolicy.core.checks import integer_errors, is_number, reject

if TYPE_CHECKING:
    from collections.abc import Iterator


@frozen(kw_only=True)
class ServerSettings:
    """What the frontend allows, and what a session has where its opener asks for nothing. Validated as a whole.

    Attributes:
        max_body_bytes: longest body of a request.
        max_inflight_bytes: most bytes of bodies that are read at a time, over all requests; a request beyond it is told
            to try again. None: 16 times the longest body.
        max_frame_pixels: most pixels of an image, read from its header before anything is decoded.
        enqueue_deadline_s: from the start of a request until its chunk is with the engine: reading and decoding.
            When it passes nothing has been sent, and the session goes on.
        reply_deadline_s: from there until the reply is complete. When it passes the session is closed.
        close_deadline_s: how long a close waits for the engine. The session's place stays taken until it has let go.
        idle_timeout_s: a session that is silent for longer is closed.
        reaper_period_s: how often silent sessions are looked for. (Before each admission they are, too.)
        tombstone_s: how long a session that has ended still says why.
        max_sessions: open sessions at a time; None: as many as the engine takes.
        max_tokens: longest reply, in tokens.
        temperature: how random replies are; 0 always takes the likeliest token.
        top_p: tokens are drawn from the likeliest ones that have this share of the probability together; 1: from all.
        repetition_penalty: above 1, tokens that the prompt or the reply has had become less likely; 1: no change.
        frequency_penalty: above 0, a token becomes less likely each time that the reply has had it; 0: no change.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    max_inflight_bytes: int | None = None
    max_frame_pixels: int = 4 * 1024 * 1024
    enqueue_deadline_s: float = 120.0
    reply_deadline_s: float = 120.0
    close_deadline_s: float = 10.0
    idle_timeout_s: float = 900.0
    reaper_period_s: float = 60.0
    tombstone_s: float = 60.0
    max_sessions: int | None = None
    max_tokens: int = 24
    temperature: float = 0.3
    top_p: float = 0.9
    repetition_penalty: float = 1.1
    frequency_penalty: float = 0.0

    def __attrs_post_init__(self) -> None:
        reject(_violations(self))

    def inflight_bytes(self) -> int:
        """Return how many bytes of bodies may be read at a time."""
        if self.max_inflight_bytes is None:
            return _NUM_LONGEST_BODIES * self.max_body_bytes
        return self.max_inflight_bytes

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters of a session whose opener names none."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
        }


_Test = Callable[[float], bool]
_SECONDS: tuple[str, _Test] = ("seconds > 0", lambda value: value > 0)
_NUMBERS: dict[str, tuple[str, _Test]] = {
    "enqueue_deadline_s": _SECONDS,
    "reply_deadline_s": _SECONDS,
    "close_deadline_s": _SECONDS,
    "idle_timeout_s": _SECONDS,
    "reaper_period_s": _SECONDS,
    "tombstone_s": _SECONDS,
    "temperature": ("a number >= 0", lambda value: value >= 0),
    "top_p": ("a number in (0, 1]", lambda value: 0 < value <= 1),
    "repetition_penalty": ("a number > 0", lambda value: value > 0),
    "frequency_penalty": ("a number from -2 to 2", lambda value: abs(value) <= _LARGEST_PENALTY),
}
_LARGEST_PENALTY = 2
_NUM_LONGEST_BODIES = 16


def _violations(settings: ServerSettings) -> Iterator[str]:
    for name in ("max_body_bytes", "max_frame_pixels", "max_tokens"):
        yield from integer_errors(f"settings.{name}", getattr(settings, name), 1)
    # Below the longest body there would be bodies that never can be read.
    least = 1 if any(integer_errors("", settings.max_body_bytes, 1)) else settings.max_body_bytes
    yield from integer_errors("settings.max_inflight_bytes", settings.max_inflight_bytes, least, optional=True)
    yield from integer_errors("settings.max_sessions", settings.max_sessions, 1, optional=True)
    for name, (expected, holds) in _NUMBERS.items():
        value = getattr(settings, name)
        if not (is_number(value) and math.isfinite(value) and holds(value)):
            yield f"settings.{name}: expected {expected}, got {value!r}"

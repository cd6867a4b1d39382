"""Steps of an engine, and what one run of many steps comes to: plain values that travel as JSON."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence


@frozen(kw_only=True)
class Step:
    """One engine step: its time, and what it did.

    Attributes:
        num_tokens: tokens decoded; 0 if it computed a prompt, or recomputed anything.
        num_events: events applied at its start.
    """

    duration_s: float
    num_tokens: int
    num_events: int = 0


@frozen(kw_only=True)
class RunRow:
    """What one run of a workload gave. Times in ms are medians; None: there was no such step.

    Attributes:
        num_output_tokens: tokens delivered.
        wall_s: from handing the requests in to the last output.
        num_decode_tokens: tokens of the steps that only decoded; ``decode_s`` is what they took.
        step_ms: decode steps without an event; ``step_slow_ms``: 95 % of them are faster.
        event_step_ms: decode steps with at least one event.
        expand_s: time spent on finding out what goes where, over all events; ``relocate_s`` on moving it.
        peak_blocks: most KV blocks in use after a step.
        peak_memory_bytes: of the engine's process since it was started.
        idle_s: how long the engine had nothing to do before this run; ``idle_cpu_s`` is what it used meanwhile.
        other_cpu_s: time that processors spent on other processes during this run; None: the system does not tell.
    """

    num_output_tokens: int
    wall_s: float
    num_decode_tokens: int
    decode_s: float
    num_steps: int
    num_decode_steps: int
    num_event_steps: int
    step_ms: float | None
    step_slow_ms: float | None
    event_step_ms: float | None
    num_events: int = 0
    num_dropped: int = 0
    num_moved: int = 0
    expand_s: float = 0.0
    relocate_s: float = 0.0
    peak_blocks: int = 0
    num_preemptions: int = 0
    peak_memory_bytes: int = 0
    idle_s: float = 0.0
    idle_cpu_s: float = 0.0
    other_cpu_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens delivered per second, prompts and all included."""
        return self.num_output_tokens / self.wall_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens per second of decode steps."""
        return self.num_decode_tokens / self.decode_s if self.decode_s else None


def decoded_tokens(before: Sequence[int], after: Sequence[int]) -> int:
    """Return how many requests a step decoded one token of; 0 if it did anything else, too.

    Args:
        before: computed tokens of each request before the step.
        after: the same behind it. A preempted request starts again from none.

    >>> decoded_tokens([70, 71, 64], [71, 72, 64]), decoded_tokens([70, 0], [71, 64]), decoded_tokens([70, 71], [71, 0])
    (2, 0, 0)
    """
    grown = [new - old for old, new in zip(before, after, strict=True)]
    return sum(grown) if all(growth in (0, 1) for growth in grown) else 0


def summarise_steps(steps: Sequence[Step], *, num_output_tokens: int, wall_s: float) -> RunRow:
    """Return the row of a run, without what is counted elsewhere."""
    decoding = [step for step in steps if step.num_tokens]
    between = sorted(step.duration_s for step in decoding if not step.num_events)
    with_events = [step.duration_s for step in decoding if step.num_events]
    return RunRow(
        num_output_tokens=num_output_tokens,
        wall_s=wall_s,
        num_decode_tokens=sum(step.num_tokens for step in decoding),
        decode_s=sum(step.duration_s for step in decoding),
        num_steps=len(steps),
        num_decode_steps=len(decoding),
        num_event_steps=sum(step.num_events > 0 for step in steps),
        step_ms=1000 * median(between) if between else None,
        step_slow_ms=1000 * between[int(0.95 * (len(between) - 1))] if between else None,
        event_step_ms=1000 * median(with_events) if with_events else None,
        num_events=sum(step.num_events for step in steps),
    )

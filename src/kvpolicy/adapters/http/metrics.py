"""What Prometheus shows of the sessions, beside vLLM's own figures and under a prefix of ours.

The collectors are registered once per process, with the default registry.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import frozen
from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpolicy.core.counts import SessionCounts
    from kvpolicy.core.replies import Reply, SessionStats

_PREFIX = "kvpolicy:session_"
_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_LATENCY_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
STATES = ("idle", "pending", "closing")


@cache
def _collectors() -> dict[str, Any]:
    def make(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
        return kind(_PREFIX + name, text, labelnames=("model_name", *labels), **options)

    return {
        "sessions": make(Gauge, "open", "Sessions, by state.", "state"),
        "tokens": make(Gauge, "resident_tokens", "Tokens that the sessions hold, as of their last replies."),
        "blocks": make(
            Gauge,
            "resident_blocks",
            "KV blocks that the sessions held at their last replies. One that was parked since then holds none.",
        ),
        "evictions": make(Counter, "evictions", "How often chunks pushed something out."),
        "evicted": make(Counter, "evicted_tokens", "Tokens that chunks pushed out."),
        "consolidations": make(Counter, "consolidations", "Windows that were computed anew."),
        "chunks": make(Counter, "chunks", "Chunks that were answered."),
        "refusals": make(Counter, "refused_chunks", "Chunks that were not taken in, by code.", "code"),
        "no_room": make(Counter, "refused_opens", "Sessions for which there was no room."),
        "timeouts": make(Counter, "timeouts", "Deadlines that passed: enqueue, reply or close.", "deadline"),
        "closes": make(Counter, "closes", "Sessions that ended, by reason.", "reason"),
        "ttft": make(Histogram, "chunk_ttft_seconds", "From a chunk to its first token.", buckets=_TTFT_BUCKETS),
        "latency": make(
            Histogram, "chunk_latency_seconds", "From a chunk to its last token.", buckets=_LATENCY_BUCKETS
        ),
    }


@frozen
class SessionMetrics:
    """The figures of one frontend. A process has one: the gauges of a second would hide the first's."""

    model: str

    def show(self, sessions: Iterable[tuple[str, SessionStats]]) -> None:
        """Set the gauges to what these sessions, each with its state, hold."""
        num_by_state, tokens, blocks = dict.fromkeys(STATES, 0), 0, 0
        for state, stats in sessions:
            num_by_state[state] += 1
            tokens += stats.resident_tokens
            blocks += stats.num_blocks
        for state, num in num_by_state.items():
            self._of("sessions", state).set(num)
        self._of("tokens").set(tokens)
        self._of("blocks").set(blocks)

    def answered(self, reply: Reply, since_reply: SessionCounts) -> None:
        """Count one reply, and what was counted since the one before."""
        self._of("chunks").inc()
        self._of("evictions").inc(since_reply.num_evictions)
        self._of("evicted").inc(since_reply.num_evicted_tokens)
        self._of("consolidations").inc(since_reply.num_consolidations)
        self._of("ttft").observe(reply.ttft_s)
        self._of("latency").observe(reply.total_s)

    def refused(self, code: str) -> None:
        """Count a chunk that was not taken in."""
        self._of("refusals", code).inc()

    def no_room(self) -> None:
        """Count a session that could not be admitted."""
        self._of("no_room").inc()

    def timed_out(self, deadline: str) -> None:
        """Count a deadline that passed."""
        self._of("timeouts", deadline).inc()

    def closed(self, reason: str) -> None:
        """Count the end of a session."""
        self._of("closes", reason).inc()

    def _of(self, name: str, *labels: str) -> Any:
        return _collectors()[name].labels(self.model, *labels)

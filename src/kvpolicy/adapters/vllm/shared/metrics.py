"""Engine-wide counters of compaction: what the front end knows, and what Prometheus shows."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, field
from prometheus_client import Counter
from vllm.v1.metrics.loggers import StatLoggerBase

from kvpolicy.adapters.vllm.shared.messages import CompactionTotals

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig

_HELP = {
    "num_events": ("kvpolicy:compaction_events", "Events applied."),
    "num_dropped": ("kvpolicy:compaction_dropped_entries", "Entries dropped, per KV head and layer."),
    "num_blocks_returned": ("kvpolicy:compaction_returned_blocks", "Blocks that events gave back to the pool."),
    "num_preemptions": ("kvpolicy:compaction_preemptions", "Preemptions of requests that have a policy."),
    "num_moved": ("kvpolicy:compaction_moved_entries", "Entries moved by one worker, over its layers and KV heads."),
    "expand_s": ("kvpolicy:compaction_expand_seconds", "Time one worker spent on finding out what goes where."),
    "relocate_s": ("kvpolicy:compaction_relocate_seconds", "Time one worker spent on moving entries."),
}


@define
class CompactionCounters:
    """The latest totals that the engine has sent."""

    totals: CompactionTotals = field(factory=CompactionTotals)


class CompactionStatLogger(StatLoggerBase):
    """Shows the totals of one engine to Prometheus."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0, *, counters: CompactionCounters) -> None:
        """Show ``counters`` under the model's name."""
        labels = (str(vllm_config.model_config.served_model_name), str(engine_index))
        self._counters = counters
        self._shown = CompactionTotals()
        self._children = {name: _counter(*names).labels(*labels) for name, names in _HELP.items()}

    @classmethod
    def factory(cls, counters: CompactionCounters) -> Callable[[VllmConfig, int], CompactionStatLogger]:
        """Return what vLLM calls to make the logger."""

        def make(vllm_config: VllmConfig, engine_index: int = 0) -> CompactionStatLogger:
            return cls(vllm_config, engine_index, counters=counters)

        return make

    def record(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's own statistics are not needed
        """Show what has been counted since the last call."""
        totals = self._counters.totals
        if totals is self._shown:
            return
        before = asdict(self._shown)
        for name, value in asdict(totals).items():
            self._children[name].inc(value - before[name])
        self._shown = totals

    def log_engine_initialized(self) -> None:
        """Say nothing: the scheduler logs the policy."""


@cache
def _counter(name: str, documentation: str) -> Counter:
    """Return the process's counter of this name: engines that follow each other share it."""
    return Counter(name, documentation, labelnames=("model_name", "engine"))

"""What is asked of one streaming run and what it gave: plain values that travel between processes as JSON."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, field, frozen

from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

SYSTEM_PROMPT = (
    "You listen to a long text that is read to you piece by piece. "
    "After each piece, say in one short sentence what has just happened."
)
MIB = 1 << 20


class EngineKind(Enum):
    """Whose engine runs: vLLM with kvpolicy's sessions, or vLLM's own classes as they are."""

    BOUNDED = "bounded"
    STOCK = "stock"


class Outcome(Enum):
    """How a run ended."""

    FINISHED = "finished"
    """Every chunk was answered."""
    DIED = "died"
    """The engine process ended, and with it every request in it."""
    FAILED = "failed"
    """An error ended the run; the engine may be well."""
    TIMED_OUT = "timed out"
    """No chunk was answered for too long."""


@frozen(kw_only=True)
class StreamSettings:
    """One stream: the model, how the text is cut, and the limits. Sizes are tokens unless named bytes."""

    model: str
    num_chunks: int = 220
    chunk_tokens: int = 48
    reply_tokens: int = 12
    budget: int = 1024
    context: int = 2048
    block_size: int = 32
    dtype: str = "bfloat16"
    system_prompt: str = SYSTEM_PROMPT
    # 0 is greedy. A model as small as the demo's then says for ever what it said first.
    temperature: float = 0.8
    consolidation_threshold: float = 0.7
    kv_cache_bytes: int = 128 * MIB

    def __attrs_post_init__(self) -> None:
        """Check the sizes; what the engine and the session check themselves is left to them."""
        names = (
            "num_chunks",
            "chunk_tokens",
            "reply_tokens",
            "budget",
            "context",
            "block_size",
            "kv_cache_bytes",
        )
        reasons = [
            f"{name}: expected an integer >= 1, got {getattr(self, name)!r}"
            for name in names
            if type(getattr(self, name)) is not int or getattr(self, name) < 1
        ]
        if reasons:
            raise PolicyUsageError(reasons)

    def engine_arguments(self) -> dict[str, Any]:
        """Return vLLM's engine arguments, the same for both engines; eager, so that the start is quick."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self.context,
            "block_size": self.block_size,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "enforce_eager": True,
            "disable_log_stats": True,
        }

    def sampling(self) -> dict[str, Any]:
        """Return arguments of vLLM's sampling parameters for a chunk, all but the seed."""
        if self.temperature == 0:
            return {"temperature": 0.0, "max_tokens": self.reply_tokens}
        random = {"temperature": self.temperature, "top_p": 0.9, "repetition_penalty": 1.1}
        return {**random, "max_tokens": self.reply_tokens}

    def retention(self) -> dict[str, Any]:
        """Return the session's budget: tokens alone decide, or the number of chunks would cut in first."""
        return {
            "total_tokens": self.budget,
            "min_total_tokens": min(self.budget, 1024),
            "content_segments": 1_000_000,
            "consolidation_threshold": self.consolidation_threshold,
        }


@frozen(kw_only=True)
class ChunkRow:
    """One answered chunk, counted from 1.

    ``resident_tokens`` and ``num_blocks`` are what the session holds after the reply; for the stock engine
    they are computed from what was fed and said. ``next_position`` is the RoPE position of the next token.
    ``host_memory_bytes`` is the resident memory of the engine's process and its children.
    """

    chunk: int
    ttft_s: float
    total_s: float
    text_tokens: int
    reply: str
    reply_tokens: int
    resident_tokens: int
    num_blocks: int
    num_evicted_tokens: int = 0
    consolidated: bool = False
    next_position: int = 0
    host_memory_bytes: int | None = None


@frozen(kw_only=True)
class RunEnd:
    """How a run ended: ``error`` is what the client saw, ``reason`` what the engine process wrote, if any."""

    outcome: Outcome
    error: str = ""
    reason: str = ""

    def with_reason(self, reason: str) -> RunEnd:
        """Return the same end with the reason found in the log."""
        return evolve(self, reason=reason)


@frozen(kw_only=True)
class Run:
    """One run from start to end. ``facts`` holds versions and what the engine says of the model."""

    kind: EngineKind
    settings: StreamSettings
    rows: tuple[ChunkRow, ...]
    end: RunEnd
    start_s: float = 0.0
    wall_s: float = 0.0
    facts: Mapping[str, Any] = field(factory=dict)


def run_to_json(run: Run) -> dict[str, Any]:
    """Return a run as JSON values."""
    return asdict(run, value_serializer=_plain)


def _plain(_instance: object, _attribute: object, value: Any) -> Any:  # noqa: ANN401 - any field's value
    return value.value if isinstance(value, Enum) else value

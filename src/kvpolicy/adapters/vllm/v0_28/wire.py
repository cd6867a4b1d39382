"""What kvpolicy adds to vLLM's own messages: extra_args (in), a step directive (to workers), a report (out).

All three are plain dictionaries, tuples and numbers, because they are pickled or packed between processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import asdict, frozen

# Key under which a caller asks for retention: SamplingParams(extra_args={"streaming_retention": {...}}).
RETENTION_KEY = "streaming_retention"
# Key that is ours alone. The facade strips it from what callers send: any HTTP client can set extra_args.
INTERNAL_KEY = "kvpolicy"
# Prefix of every stop reason that kvpolicy itself gives to a chunk.
STOP_PREFIX = "kvpolicy:"


@frozen
class ChunkMarker:
    """Place of one message in its session: the chunk's ordinal, or the end of input."""

    ordinal: int
    final: bool = False

    def to_extra_args(self, extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a copy of ``extra_args`` that carries this marker instead of any other."""
        return {**(extra_args or {}), INTERNAL_KEY: {"ordinal": self.ordinal, "final": self.final}}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> ChunkMarker | None:
        """Return the marker, or None where the message came through a stock front end."""
        value = (extra_args or {}).get(INTERNAL_KEY)
        match value:
            case {"ordinal": int(ordinal), "final": bool(final)}:
                return cls(ordinal, final=final)
        return None


@frozen(kw_only=True)
class StepDirective:
    """What the workers must know about one step: positions to add, by request id (0 is left out)."""

    rope_shifts: Mapping[str, int]


@frozen(kw_only=True)
class ChunkReport:
    """What the scheduler says about one chunk when its reply has ended (or the chunk was refused).

    Token and block counts are those of the session at that moment; ``evicted`` counts the tokens that left since the
    reply before, and ``consolidated`` says whether the window was computed anew since then; ``code`` and ``message``
    are set on refusal or failure.
    """

    chunk: int
    resident_tokens: int
    num_blocks: int
    evicted: int = 0
    consolidated: bool = False
    next_position: int = 0
    num_segments: int = 0
    num_free_blocks: int = 0
    total_evicted_tokens: int = 0
    num_evictions: int = 0
    num_consolidations: int = 0
    num_parks: int = 0
    code: str | None = None
    message: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return the dictionary that rides on the output message."""
        return {INTERNAL_KEY: asdict(self)}

    @classmethod
    def from_wire(cls, params: Mapping[str, Any] | None) -> ChunkReport | None:
        """Return the report of an output message, or None if it carries none."""
        value = (params or {}).get(INTERNAL_KEY)
        return cls(**value) if isinstance(value, Mapping) else None

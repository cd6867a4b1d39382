"""KV-cache eviction for LLM inference engines: bounded streaming sessions.

This package root is the pure core: values and planners, no engine. ``kvpolicy.adapters.vllm`` drives vLLM
with it. Importing ``kvpolicy`` loads nothing but the standard library and attrs, and has no effect.
"""

from __future__ import annotations

from kvpolicy.core.budget import RetentionBudget, SessionLimits, admission_errors
from kvpolicy.core.errors import (
    CapacityError,
    ChunkRefusedError,
    EngineContractError,
    InvariantError,
    KVPolicyError,
    MissingExtraError,
    PolicyUsageError,
    SessionClosedError,
    SessionFailedError,
    UnsupportedEngineError,
)
from kvpolicy.core.fold import (
    Append,
    ChunkShape,
    Consolidate,
    DropTail,
    Evict,
    FoldPlan,
    FoldStep,
    Refuse,
    consolidates_next,
    plan_fold,
)
from kvpolicy.core.ledger import SessionLedger
from kvpolicy.core.positions import PositionMap
from kvpolicy.core.ranking import IdleSession, rank_idle_sessions
from kvpolicy.core.segments import Segment, SegmentKind, SegmentLog
from kvpolicy.core.spaces import (
    BlockId,
    BlockSpan,
    KVIndex,
    LogicalPosition,
    Slot,
    TokenRange,
    align_inward,
    blocks_for,
)
from kvpolicy.core.states import SessionInput, SessionState, next_state
from kvpolicy.core.victims import Victims, oldest_victims

__version__ = "0.1.0"

__all__ = [
    "Append",
    "BlockId",
    "BlockSpan",
    "CapacityError",
    "ChunkRefusedError",
    "ChunkShape",
    "Consolidate",
    "DropTail",
    "EngineContractError",
    "Evict",
    "FoldPlan",
    "FoldStep",
    "IdleSession",
    "InvariantError",
    "KVIndex",
    "KVPolicyError",
    "LogicalPosition",
    "MissingExtraError",
    "PolicyUsageError",
    "PositionMap",
    "Refuse",
    "RetentionBudget",
    "Segment",
    "SegmentKind",
    "SegmentLog",
    "SessionClosedError",
    "SessionFailedError",
    "SessionInput",
    "SessionLedger",
    "SessionLimits",
    "SessionState",
    "Slot",
    "TokenRange",
    "UnsupportedEngineError",
    "Victims",
    "__version__",
    "admission_errors",
    "align_inward",
    "blocks_for",
    "consolidates_next",
    "next_state",
    "oldest_victims",
    "plan_fold",
    "rank_idle_sessions",
]

"""KV-cache eviction for LLM inference engines: bounded streaming sessions, and policies for long generations.

This package root is the pure core: values, policies and planners, no engine. ``kvpolicy.adapters.vllm`` drives vLLM
with it; ``kvpolicy.testing`` tests policies. Importing ``kvpolicy`` loads nothing but the standard library and attrs,
and has no effect.
"""

from __future__ import annotations

from kvpolicy.core.at_rest import plan_consolidation
from kvpolicy.core.budget import RetentionBudget, SessionLimits, admission_errors
from kvpolicy.core.compaction import (
    CompactionEvent,
    HeadPlan,
    Move,
    expand,
    retained_positions,
    surviving_blocks,
)
from kvpolicy.core.counts import SessionCounts
from kvpolicy.core.draws import BlockDraw, Draw, RingDraw, UniformDraw
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
    Park,
    Refuse,
    plan_fold,
)
from kvpolicy.core.ledger import SessionLedger
from kvpolicy.core.policies import (
    KVPolicy,
    PolicyFactory,
    PolicyRegistry,
    RandKV,
    RequestSnapshot,
    SinkWindow,
    built_in_policies,
    due_event,
)
from kvpolicy.core.policy_options import policy_from
from kvpolicy.core.positions import PositionMap
from kvpolicy.core.ranking import IdleSession, rank_idle_sessions
from kvpolicy.core.schedule import EventSchedule, block_schedule, token_schedule
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
    "BlockDraw",
    "BlockId",
    "BlockSpan",
    "CapacityError",
    "ChunkRefusedError",
    "ChunkShape",
    "CompactionEvent",
    "Consolidate",
    "Draw",
    "DropTail",
    "EngineContractError",
    "EventSchedule",
    "Evict",
    "FoldPlan",
    "FoldStep",
    "HeadPlan",
    "IdleSession",
    "InvariantError",
    "KVIndex",
    "KVPolicy",
    "KVPolicyError",
    "LogicalPosition",
    "MissingExtraError",
    "Move",
    "Park",
    "PolicyFactory",
    "PolicyRegistry",
    "PolicyUsageError",
    "PositionMap",
    "RandKV",
    "Refuse",
    "RequestSnapshot",
    "RetentionBudget",
    "RingDraw",
    "Segment",
    "SegmentKind",
    "SegmentLog",
    "SessionClosedError",
    "SessionCounts",
    "SessionFailedError",
    "SessionInput",
    "SessionLedger",
    "SessionLimits",
    "SessionState",
    "SinkWindow",
    "Slot",
    "TokenRange",
    "UniformDraw",
    "UnsupportedEngineError",
    "Victims",
    "__version__",
    "admission_errors",
    "align_inward",
    "block_schedule",
    "blocks_for",
    "built_in_policies",
    "due_event",
    "expand",
    "next_state",
    "oldest_victims",
    "plan_consolidation",
    "plan_fold",
    "policy_from",
    "rank_idle_sessions",
    "retained_positions",
    "surviving_blocks",
    "token_schedule",
]

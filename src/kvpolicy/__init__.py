"""KV-cache eviction for LLM inference engines: bounded streaming sessions, and policies for long generations.

This package root holds what integrators name: errors, policies and what they are written with, budgets. All else of the
pure core (planners, values, draws) is imported from its module in ``kvpolicy.core``. ``kvpolicy.adapters.vllm`` drives
vLLM with it; ``kvpolicy.testing`` tests policies. Importing ``kvpolicy`` loads nothing but the standard library and
attrs, and has no effect.
"""

from __future__ import annotations

from kvpolicy.core.budget import RetentionBudget, SessionLimits
from kvpolicy.core.compaction import CompactionEvent
from kvpolicy.core.counts import SessionCounts
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
from kvpolicy.core.policies import KVPolicy, RandKV, RequestSnapshot, SinkWindow, built_in_policies, due_event
from kvpolicy.core.policy_options import policy_from
from kvpolicy.core.schedule import EventSchedule

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "ChunkRefusedError",
    "CompactionEvent",
    "EngineContractError",
    "EventSchedule",
    "InvariantError",
    "KVPolicy",
    "KVPolicyError",
    "MissingExtraError",
    "PolicyUsageError",
    "RandKV",
    "RequestSnapshot",
    "RetentionBudget",
    "SessionClosedError",
    "SessionCounts",
    "SessionFailedError",
    "SessionLimits",
    "SinkWindow",
    "UnsupportedEngineError",
    "__version__",
    "built_in_policies",
    "due_event",
    "policy_from",
]

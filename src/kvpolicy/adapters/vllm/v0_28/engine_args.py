"""Engine arguments for an engine with sessions: what the user gave, plus the seams that kvpolicy needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from kvpolicy.adapters.vllm.v0_28.guards import config_errors
from kvpolicy.adapters.vllm.v0_28.options import CONFIG_KEY, SessionOptions
from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PACKAGE = "kvpolicy.adapters.vllm.v0_28"
_SCHEDULER = f"{_PACKAGE}.scheduler.SessionScheduler"
_CPU_WORKER = f"{_PACKAGE}.worker.SessionCPUWorker"
_GPU_WORKER = f"{_PACKAGE}.worker.SessionGPUWorker"


def session_engine_args(arguments: Mapping[str, Any], *, max_sessions: int | None = None) -> AsyncEngineArgs:
    """Return stock engine arguments with our scheduler and worker and async scheduling off.

    Raises:
        PolicyUsageError: the caller set one of the arguments that sessions must set themselves.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    ours = {
        "scheduler_cls": _SCHEDULER,
        "worker_cls": _CPU_WORKER if current_platform.is_cpu() else _GPU_WORKER,
        "async_scheduling": False,
    }
    reasons = [
        f"{name}: sessions need {value!r}, got {given[name]!r}; leave it out"
        for name, value in ours.items()
        if given.get(name, value) not in (value, "auto")
    ]
    additional = given.pop("additional_config", {})
    if not isinstance(additional, Mapping):
        reasons.append(f"additional_config: expected a mapping, got {type(additional).__name__}")
    if reasons:
        raise PolicyUsageError(reasons)
    if max_sessions is not None:
        additional = {**additional, CONFIG_KEY: {**additional.get(CONFIG_KEY, {}), "max_sessions": max_sessions}}
    return AsyncEngineArgs(**{**given, **ours, "additional_config": dict(additional)})


def checked_config(engine_args: AsyncEngineArgs) -> VllmConfig:
    """Return the engine configuration, checked before any model is loaded.

    Raises:
        PolicyUsageError: every reason why sessions cannot run under it.
    """
    config = engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    require_session_config(config)
    return config


def require_session_config(config: VllmConfig) -> None:
    """Check a ready engine configuration.

    Raises:
        PolicyUsageError: every reason why sessions cannot run under it.
    """
    reasons = list(config_errors(config))
    seams = (
        ("scheduler_cls", config.scheduler_config.scheduler_cls, (_SCHEDULER,)),
        ("worker_cls", config.parallel_config.worker_cls, (_CPU_WORKER, _GPU_WORKER)),
    )
    reasons += [
        f"{name}: sessions need {' or '.join(ours)}, got {value!r}; pass engine arguments to AsyncLLM instead"
        for name, value, ours in seams
        if value not in ours
    ]
    try:
        SessionOptions.from_config(config)
    except PolicyUsageError as error:
        reasons += error.reasons
    if reasons:
        raise PolicyUsageError(reasons)

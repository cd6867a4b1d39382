"""Engine arguments for an engine with sessions or policies: what the user gave, plus the seams that kvpolicy needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from kvpolicy.adapters.vllm.v0_28.guards import compaction_errors, config_errors
from kvpolicy.adapters.vllm.v0_28.options import CONFIG_KEY, POLICY_KEY, EngineOptions, policy_errors
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.policy_options import as_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig

_PACKAGE = "kvpolicy.adapters.vllm.v0_28"
_SESSION_SCHEDULER = f"{_PACKAGE}.scheduler.SessionScheduler"
_COMPACTION_SCHEDULER = f"{_PACKAGE}.compaction_scheduler.CompactionScheduler"
_CPU_WORKER = f"{_PACKAGE}.worker.PolicyCPUWorker"
_GPU_WORKER = f"{_PACKAGE}.worker.PolicyGPUWorker"


def session_engine_args(
    arguments: Mapping[str, Any], *, max_sessions: int | None = None, kv_cache_policy: Any = None
) -> AsyncEngineArgs:
    """Return stock engine arguments with our scheduler and worker and async scheduling off.

    Raises:
        PolicyUsageError: the caller set one of the arguments that kvpolicy must set itself.
    """
    options = {"max_sessions": max_sessions, POLICY_KEY: _portable(kv_cache_policy)}
    return AsyncEngineArgs(**_with_seams(arguments, _SESSION_SCHEDULER, options))


def policy_arguments(arguments: Mapping[str, Any], kv_cache_policy: Any) -> dict[str, Any]:
    """Return the arguments of a stock ``LLM`` with our scheduler and worker and async scheduling off.

    Raises:
        PolicyUsageError: every reason why requests cannot have a policy in such an engine, before it is started.
    """
    ours = _with_seams(arguments, _COMPACTION_SCHEDULER, {POLICY_KEY: _portable(kv_cache_policy)})
    names = {field.name for field in fields(EngineArgs)}
    # The class itself makes objects of these, and nothing of them is checked here.
    own = ("compilation_config", "structured_outputs_config", "profiler_config")
    checked = {
        name: value
        for name, value in ours.items()
        if name in names and not (name in own and isinstance(value, int | dict))
    }
    if isinstance(checked.get("kv_transfer_config"), dict):
        checked["kv_transfer_config"] = KVTransferConfig(**checked["kv_transfer_config"])
    config = EngineArgs(**checked).create_engine_config(UsageContext.LLM_CLASS)
    _require(config, (compaction_errors,), (_COMPACTION_SCHEDULER,))
    return ours


def _portable(policy: Any) -> Any:
    """Return a policy in a form that every process of the engine can read; what is no policy as it is, to be refused.

    Raises:
        PolicyUsageError: options that JSON does not have.
    """
    return as_text(policy) if isinstance(policy, str | Mapping) else policy


def _with_seams(arguments: Mapping[str, Any], scheduler: str, options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in arguments.items() if value is not None}
    ours = {
        "scheduler_cls": scheduler,
        "worker_cls": _CPU_WORKER if current_platform.is_cpu() else _GPU_WORKER,
        "async_scheduling": False,
    }
    reasons = [
        f"{name}: kvpolicy needs {value!r}, got {given[name]!r}; leave it out"
        for name, value in ours.items()
        if given.get(name, value) not in (value, "auto")
    ]
    additional = given.pop("additional_config", {})
    if not isinstance(additional, Mapping):
        reasons.append(f"additional_config: expected a mapping, got {type(additional).__name__}")
    elif not isinstance(additional.get(CONFIG_KEY, {}), Mapping):
        got = type(additional[CONFIG_KEY]).__name__
        reasons.append(f"additional_config[{CONFIG_KEY!r}]: expected a mapping, got {got}")
    if reasons:
        # There will be no configuration to check; what else can be known without one is said now.
        raise PolicyUsageError([*policy_errors(options.get(POLICY_KEY)), *reasons])
    set_options = {name: value for name, value in options.items() if value is not None}
    if set_options:
        additional = {**additional, CONFIG_KEY: {**additional.get(CONFIG_KEY, {}), **set_options}}
    return {**given, **ours, "additional_config": dict(additional)}


def checked_config(engine_args: AsyncEngineArgs) -> VllmConfig:
    """Return the engine configuration, checked before any model is loaded.

    Raises:
        PolicyUsageError: every reason why sessions, or the policy that was asked for, cannot run under it.
    """
    config = engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    require_session_config(config)
    return config


def require_session_config(config: VllmConfig) -> None:
    """Check a ready engine configuration.

    Raises:
        PolicyUsageError: every reason why sessions, or the policy that was asked for, cannot run under it.
    """
    _require(config, (config_errors, compaction_errors), (_SESSION_SCHEDULER,))


def _require(
    config: VllmConfig, guards: tuple[Callable[[VllmConfig], tuple[str, ...]], ...], schedulers: tuple[str, ...]
) -> None:
    reasons: list[str] = []
    compacts = True
    try:
        compacts = EngineOptions.from_config(config).compacts
    except PolicyUsageError as error:
        reasons += error.reasons
    for guard in guards:
        if compacts or guard is not compaction_errors:
            reasons += guard(config)
    seams = (
        ("scheduler_cls", config.scheduler_config.scheduler_cls, schedulers),
        ("worker_cls", config.parallel_config.worker_cls, (_CPU_WORKER, _GPU_WORKER)),
    )
    reasons += [
        f"{name}: kvpolicy needs {' or '.join(ours)}, got {value!r}; pass engine arguments to AsyncLLM instead"
        for name, value, ours in seams
        if value not in ours
    ]
    if reasons:
        raise PolicyUsageError(reasons)

"""Engine arguments for an engine with sessions or policies: what the user gave, plus the seams that kvpolicy needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from kvpolicy.adapters.vllm.shared.options import CONFIG_KEY, POLICY_KEY, EngineOptions, policy_errors
from kvpolicy.adapters.vllm.v0_28.startup.guards import POLICIES, SESSIONS, start_errors
from kvpolicy.core.checks import reject
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.policies import OFF
from kvpolicy.core.policy_options import as_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.config import VllmConfig

_PACKAGE = "kvpolicy.adapters.vllm.v0_28"
_SESSION_SCHEDULER = f"{_PACKAGE}.scheduler.session_scheduler.SessionScheduler"
_COMPACTION_SCHEDULER = f"{_PACKAGE}.scheduler.policy_scheduler.CompactionScheduler"
_CPU_WORKER = f"{_PACKAGE}.worker.workers.PolicyCPUWorker"
_GPU_WORKER = f"{_PACKAGE}.worker.workers.PolicyGPUWorker"


def session_engine_args(
    arguments: Mapping[str, Any], *, max_sessions: int | None = None, kv_cache_policy: Any = None
) -> tuple[AsyncEngineArgs, tuple[str, ...]]:
    """Return stock engine arguments with our scheduler and worker and async scheduling off.

    Beside them: every reason why what was given cannot be. The arguments make a configuration all the same, so that
    what its guards say comes with these reasons.
    """
    options = {"max_sessions": max_sessions, POLICY_KEY: kv_cache_policy}
    ours, reasons = _with_seams(arguments, _SESSION_SCHEDULER, options)
    return AsyncEngineArgs(**ours), reasons


def policy_arguments(arguments: Mapping[str, Any], kv_cache_policy: Any) -> dict[str, Any]:
    """Return the arguments of a stock ``LLM`` with our scheduler and worker and async scheduling off.

    Raises:
        PolicyUsageError: every reason why requests cannot have a policy in such an engine, before it is started.
    """
    ours, reasons = _with_seams(arguments, _COMPACTION_SCHEDULER, {POLICY_KEY: kv_cache_policy})
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
    config = _config(EngineArgs(**checked), UsageContext.LLM_CLASS, reasons, kv_cache_policy)
    reject([*reasons, *_config_errors(config, (POLICIES,), _COMPACTION_SCHEDULER)])
    return ours


def _with_seams(
    arguments: Mapping[str, Any], scheduler: str, options: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments with what kvpolicy sets, and why those that were given cannot be."""
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
        additional = {}
    own = additional.get(CONFIG_KEY, {})
    if not isinstance(own, Mapping):
        reasons.append(f"additional_config[{CONFIG_KEY!r}]: expected a mapping, got {type(own).__name__}")
        own = {}
    set_options = {name: value for name, value in options.items() if value is not None}
    try:
        set_options |= _portable(set_options)
    except PolicyUsageError as error:
        reasons += error.reasons
        # Requests might have had a policy: what is said of such engines is still asked.
        set_options[POLICY_KEY] = OFF
    if set_options or CONFIG_KEY in additional:
        additional = {**additional, CONFIG_KEY: {**own, **set_options}}
    return {**given, **ours, "additional_config": dict(additional)}, tuple(reasons)


def _portable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy in a form that every process of the engine can read; what is no policy is left, to be refused.

    Raises:
        PolicyUsageError: options that JSON does not have.
    """
    policy = options.get(POLICY_KEY)
    return {POLICY_KEY: as_text(policy)} if isinstance(policy, str | Mapping) else {}


def checked_config(
    arguments: Mapping[str, Any], *, max_sessions: int | None = None, kv_cache_policy: Any = None
) -> VllmConfig:
    """Return the engine configuration, with what kvpolicy sets, checked before any model is loaded.

    Raises:
        PolicyUsageError: every reason why sessions, or the policy that was asked for, cannot run under it.
    """
    ours, reasons = session_engine_args(arguments, max_sessions=max_sessions, kv_cache_policy=kv_cache_policy)
    config = _config(ours, UsageContext.ENGINE_CONTEXT, reasons, kv_cache_policy)
    reject([*reasons, *session_config_errors(config)])
    return config


def _config(engine_args: EngineArgs, context: UsageContext, reasons: Iterable[str], policy: Any) -> VllmConfig:
    """Return the engine configuration.

    Raises:
        PolicyUsageError: there is none, and there are reasons of ours beside vLLM's.
    """
    try:
        return engine_args.create_engine_config(context)
    except Exception as error:
        # Whatever it is, also one of vLLM's assertions: what is known already is not lost.
        if found := [*policy_errors(policy), *reasons]:
            raise PolicyUsageError([*found, f"engine configuration: {str(error) or type(error).__name__}"]) from error
        raise


def session_config_errors(config: VllmConfig) -> tuple[str, ...]:
    """Return every reason why sessions, or the policy that was asked for, cannot run under a ready configuration."""
    return _config_errors(config, (SESSIONS, POLICIES), _SESSION_SCHEDULER)


def _config_errors(config: VllmConfig, features: Sequence[str], scheduler: str) -> tuple[str, ...]:
    reasons: list[str] = []
    compacts = True
    try:
        compacts = EngineOptions.from_config(config).compacts
    except PolicyUsageError as error:
        reasons += error.reasons
    reasons += start_errors(config, [feature for feature in features if compacts or feature != POLICIES])
    seams = (
        ("scheduler_cls", config.scheduler_config.scheduler_cls, (scheduler,)),
        ("worker_cls", config.parallel_config.worker_cls, (_CPU_WORKER, _GPU_WORKER)),
    )
    reasons += [
        f"{name}: kvpolicy needs {' or '.join(ours)}, got {value!r}; pass engine arguments to AsyncLLM instead"
        for name, value, ours in seams
        if value not in ours
    ]
    return tuple(reasons)

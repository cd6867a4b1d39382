"""Which engines sessions and policies refuse: every reason at once, each naming what the user typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.adapters.vllm.v0_28.startup.model_guards import has_chunked_prefill, layer_errors, model_errors
from kvpolicy.adapters.vllm.v0_28.startup.position_limit import position_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


SESSIONS = "sessions"
POLICIES = "kv_cache_policy"


def config_errors(config: VllmConfig) -> tuple[str, ...]:
    """Return why sessions cannot run in an engine that is configured so, whatever its model; empty if they can."""
    scheduler = config.scheduler_config
    return _engine_errors(config, SESSIONS) + _messages(
        (
            (
                not scheduler.enable_chunked_prefill and has_chunked_prefill(config.model_config),
                (
                    "--no-enable-chunked-prefill: sessions need chunked prefill "
                    "(a window is prefilled again at consolidation)"
                ),
            ),
            (
                scheduler.max_num_seqs <= 1,
                f"--max-num-seqs {scheduler.max_num_seqs}: sessions need at least 2 (an idle session keeps a slot)",
            ),
        )
    )


def compaction_errors(config: VllmConfig) -> tuple[str, ...]:
    """Return why requests cannot have a policy in an engine that is configured so; empty if they can."""
    scheduler = config.scheduler_config
    num_engines = config.parallel_config.data_parallel_size
    dtype = config.cache_config.cache_dtype
    # The CPU backend packs by the model's format, and takes another one for the cache without a word.
    dtypes = ("auto", str(config.model_config.dtype).removeprefix("torch."))
    return _engine_errors(config, POLICIES) + _messages(
        (
            (
                not scheduler.enable_chunked_prefill and has_chunked_prefill(config.model_config),
                (
                    "--no-enable-chunked-prefill: kv_cache_policy needs chunked prefill "
                    "(a preempted request is prefilled again from event to event)"
                ),
            ),
            (
                num_engines > 1,
                f"--data-parallel-size {num_engines}: {POLICIES}: must be 1 for now (its counters are of one engine)",
            ),
            (
                not scheduler.scheduler_reserve_full_isl,
                "--no-scheduler-reserve-full-isl: kv_cache_policy needs the full check (admission is a reservation)",
            ),
            (
                dtype not in dtypes,
                f"--kv-cache-dtype {dtype}: kv_cache_policy needs {' or '.join(dtypes)}, the model's own format",
            ),
        )
    )


def _engine_errors(config: VllmConfig, feature: str) -> tuple[str, ...]:
    """Return what neither sessions nor policies can run with; ``feature`` is the one that was asked for."""
    parallel = config.parallel_config
    cache = config.cache_config
    model = config.model_config
    return _messages(
        (
            (
                bool(config.scheduler_config.async_scheduling),
                f"--async-scheduling: {feature}: use --no-async-scheduling",
            ),
            (
                bool(config.use_v2_model_runner),
                (
                    f"VLLM_USE_V2_MODEL_RUNNER: {feature}: only the V1 model runner is supported for now; "
                    "set VLLM_USE_V2_MODEL_RUNNER=0"
                ),
            ),
            (
                parallel.pipeline_parallel_size > 1,
                f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: {feature}: must be 1",
            ),
            (
                parallel.decode_context_parallel_size > 1,
                f"--decode-context-parallel-size {parallel.decode_context_parallel_size}: {feature}: must be 1",
            ),
            (
                parallel.prefill_context_parallel_size > 1,
                f"--prefill-context-parallel-size {parallel.prefill_context_parallel_size}: {feature}: must be 1",
            ),
            (bool(parallel.enable_dbo), f"--enable-dbo: {feature}: not supported"),
            (config.speculative_config is not None, f"--speculative-config: {feature}: not supported"),
            (config.kv_transfer_config is not None, f"--kv-transfer-config: {feature}: not supported"),
            (config.ec_transfer_config is not None, f"--ec-transfer-config: {feature}: not supported"),
            (
                config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events,
                f"--kv-events-config: {feature}: not supported (what blocks hold changes in mid-life)",
            ),
            (bool(cache.kv_sharing_fast_prefill), f"--kv-sharing-fast-prefill: {feature}: not supported"),
            (
                cache.prefix_match_unit is not None,
                (
                    f"--prefix-match-unit: {feature}: not supported "
                    "(it publishes parts of blocks that must stay private)"
                ),
            ),
            (bool(model.enable_return_routed_experts), f"--enable-return-routed-experts: {feature}: not supported"),
            (
                not model.disable_cascade_attn,
                f"--no-disable-cascade-attn: {feature}: cascade attention must be off (--disable-cascade-attn)",
            ),
        )
    )


def _messages(refused: Iterable[tuple[bool, str]]) -> tuple[str, ...]:
    return tuple(message for is_refused, message in refused if is_refused)


_ENGINE_ERRORS: Mapping[str, Callable[[VllmConfig], tuple[str, ...]]] = {
    SESSIONS: config_errors,
    POLICIES: compaction_errors,
}


def start_errors(config: VllmConfig, features: Sequence[str]) -> tuple[str, ...]:
    """Return why these features, sessions or policies, cannot run under an engine configuration; empty if they can.

    Loads nothing: the facades ask before the engine is started, the scheduler once more when it is built.
    """
    if not features:
        return ()
    named = _together(features)
    # How far positions reach is asked of a model that has them, and keeps them.
    of_model = model_errors(config, named) or position_errors(config)
    of_engine = [reason for feature in features for reason in _ENGINE_ERRORS[feature](config)]
    return (*of_model, *of_engine)


def _together(features: Sequence[str]) -> str:
    return " and ".join(features)


def cache_errors(
    config: VllmConfig, kv_cache_config: KVCacheConfig, hash_block_size: int, block_size: int, features: Sequence[str]
) -> tuple[str, ...]:
    """Return why these features cannot run with the model's KV cache; empty if they can."""
    if not features:
        return ()
    named = _together(features)
    if reasons := layer_errors(config, kv_cache_config, named):
        return reasons
    message = f"--prefix-match-unit: {named}: must be equal to the block size {block_size}, got {hash_block_size}"
    return _messages([(hash_block_size != block_size, message)])

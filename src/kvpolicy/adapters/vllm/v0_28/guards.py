"""Which engines, requests and parameters sessions refuse: every reason at once, each naming what the user typed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpolicy.adapters.vllm.v0_28.kv_spec import BoundedAttentionSpec
from kvpolicy.adapters.vllm.v0_28.options import POLICY_KEY
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.policies import built_in_policies
from kvpolicy.core.policy_options import policy_from

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


SESSIONS = "sessions"
POLICIES = "kv_cache_policy"


def config_errors(config: VllmConfig) -> tuple[str, ...]:
    """Return why sessions cannot run under this engine configuration; empty if they can.

    Needs no model: the facade calls it before the engine is started, the scheduler once more when it is built.
    """
    scheduler = config.scheduler_config
    return _engine_errors(config, SESSIONS) + _messages(
        (
            (
                not scheduler.enable_chunked_prefill,
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
    """Return why requests cannot have a policy under this engine configuration; empty if they can."""
    scheduler = config.scheduler_config
    num_engines = config.parallel_config.data_parallel_size
    dtype = config.cache_config.cache_dtype
    # The CPU backend packs by the model's format, and takes another one for the cache without a word.
    dtypes = ("auto", str(config.model_config.dtype).removeprefix("torch."))
    return _engine_errors(config, POLICIES) + _messages(
        (
            (
                not scheduler.enable_chunked_prefill,
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
            (
                not getattr(model.hf_text_config, "rope_parameters", None),
                f"--model {model.model}: {feature}: rotary position embeddings are needed",
            ),
            (
                model.uses_mrope or model.uses_xdrope_dim > 0,
                f"--model {model.model}: {feature}: multi-dimensional RoPE is not supported yet",
            ),
        )
    )


def _messages(refused: Iterable[tuple[bool, str]]) -> tuple[str, ...]:
    return tuple(message for is_refused, message in refused if is_refused)


def cache_errors(
    config: VllmConfig, kv_cache_config: KVCacheConfig, hash_block_size: int, block_size: int, feature: str
) -> tuple[str, ...]:
    """Return why sessions or policies (the ``feature``) cannot run with the model's KV cache; empty if they can."""
    model = config.model_config.model
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return (f"--model {model}: {feature}: exactly 1 KV-cache group is needed, this model has {len(groups)}",)
    errors = []
    spec = groups[0].kv_cache_spec
    is_full = type(spec) in (FullAttentionSpec, BoundedAttentionSpec)
    if not is_full or spec.sliding_window is not None or spec.attention_chunk_size is not None or spec.non_causal:
        errors.append(f"--model {model}: {feature}: full causal attention is needed in every layer, got {spec!r}")
    if hash_block_size != block_size:
        errors.append(
            f"--prefix-match-unit: {feature}: must be equal to the block size {block_size}, got {hash_block_size}"
        )
    return tuple(errors)


def sampling_errors(params: Any) -> tuple[str, ...]:
    """Return why a session chunk cannot have these sampling parameters; empty if it can."""
    if not isinstance(params, SamplingParams):
        got = "none" if params is None else type(params).__name__
        return (f"sampling_params: expected SamplingParams, got {got} (pooling is not supported with sessions)",)
    policy = (params.extra_args or {}).get(POLICY_KEY)
    refused: Iterable[tuple[bool, str]] = (
        (
            _is_policy(policy),
            f"sampling_params.extra_args: a session has no {POLICY_KEY} (its budget bounds it), got {policy!r}",
        ),
        (params.n != 1, f"sampling_params.n: expected 1, got {params.n}"),
        (bool(params.stop), f"sampling_params.stop: expected no stop strings, got {params.stop!r}; use stop_token_ids"),
        (params.prompt_logprobs is not None, "sampling_params.prompt_logprobs: not supported with sessions"),
        (
            type(params.max_tokens) is not int or params.max_tokens < 1,
            f"sampling_params.max_tokens: expected an integer >= 1, got {params.max_tokens!r}",
        ),
    )
    return _messages(refused)


def _is_policy(value: object) -> bool:
    """Whether a request asks for a policy: for anything but nothing and "off", in whatever form."""
    try:
        return policy_from(value, built_in_policies()) is not None
    except PolicyUsageError:
        return True

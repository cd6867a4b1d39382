"""Which engines, requests and parameters sessions refuse: every reason at once, each naming what the user typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.kv_cache_interface import KVCacheConfig


def config_errors(config: VllmConfig) -> tuple[str, ...]:
    """Return why sessions cannot run under this engine configuration; empty if they can.

    Needs no model: the facade calls it before the engine is started, the scheduler once more when it is built.
    """
    parallel = config.parallel_config
    scheduler = config.scheduler_config
    cache = config.cache_config
    refused: Iterable[tuple[bool, str]] = (
        (bool(scheduler.async_scheduling), "--async-scheduling: sessions need --no-async-scheduling"),
        (
            bool(config.use_v2_model_runner),
            "VLLM_USE_V2_MODEL_RUNNER: sessions need the V1 model runner for now; set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: sessions need 1",
        ),
        (
            parallel.data_parallel_size > 1,
            (
                f"--data-parallel-size {parallel.data_parallel_size}: sessions need 1 for now "
                "(a session's chunks would go to different engines)"
            ),
        ),
        (
            parallel.decode_context_parallel_size > 1,
            f"--decode-context-parallel-size {parallel.decode_context_parallel_size}: sessions need 1",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            f"--prefill-context-parallel-size {parallel.prefill_context_parallel_size}: sessions need 1",
        ),
        (bool(parallel.enable_dbo), "--enable-dbo: not supported with sessions"),
        (config.speculative_config is not None, "--speculative-config: not supported with sessions"),
        (config.kv_transfer_config is not None, "--kv-transfer-config: not supported with sessions"),
        (config.ec_transfer_config is not None, "--ec-transfer-config: not supported with sessions"),
        (
            config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events,
            "--kv-events-config: not supported with sessions (their block hashes change in mid-life)",
        ),
        (bool(cache.kv_sharing_fast_prefill), "--kv-sharing-fast-prefill: not supported with sessions"),
        (
            cache.prefix_match_unit is not None,
            "--prefix-match-unit: not supported with sessions (it publishes parts of blocks that must stay private)",
        ),
        (
            bool(config.model_config.enable_return_routed_experts),
            "--enable-return-routed-experts: not supported with sessions",
        ),
        (
            not scheduler.enable_chunked_prefill,
            "--no-enable-chunked-prefill: sessions need chunked prefill (a window is prefilled again at consolidation)",
        ),
        (
            scheduler.max_num_seqs <= 1,
            f"--max-num-seqs {scheduler.max_num_seqs}: sessions need at least 2 (an idle session keeps a slot)",
        ),
        (
            not config.model_config.disable_cascade_attn,
            "--no-disable-cascade-attn: sessions need cascade attention off (--disable-cascade-attn)",
        ),
        (
            not getattr(config.model_config.hf_text_config, "rope_parameters", None),
            f"--model {config.model_config.model}: sessions need rotary position embeddings",
        ),
        (
            config.model_config.uses_mrope or config.model_config.uses_xdrope_dim > 0,
            f"--model {config.model_config.model}: multi-dimensional RoPE is not supported with sessions yet",
        ),
    )
    return tuple(message for is_refused, message in refused if is_refused)


def cache_errors(
    config: VllmConfig, kv_cache_config: KVCacheConfig, hash_block_size: int, block_size: int
) -> tuple[str, ...]:
    """Return why sessions cannot run with the model's KV cache; empty if they can."""
    model = config.model_config.model
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return (f"--model {model}: sessions need exactly 1 KV-cache group, this model has {len(groups)}",)
    errors = []
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec or spec.sliding_window is not None or spec.attention_chunk_size is not None:
        errors.append(f"--model {model}: sessions need full attention in every layer, this model has {spec!r}")
    if hash_block_size != block_size:
        errors.append(
            f"--prefix-match-unit: sessions need it equal to the block size {block_size}, got {hash_block_size}"
        )
    return tuple(errors)


def sampling_errors(params: SamplingParams | None) -> tuple[str, ...]:
    """Return why a session chunk cannot have these sampling parameters; empty if it can."""
    if params is None:
        return ("sampling_params: expected SamplingParams, got none (pooling is not supported with sessions)",)
    refused: Iterable[tuple[bool, str]] = (
        (params.n != 1, f"sampling_params.n: expected 1, got {params.n}"),
        (bool(params.stop), f"sampling_params.stop: expected no stop strings, got {params.stop!r}; use stop_token_ids"),
        (params.prompt_logprobs is not None, "sampling_params.prompt_logprobs: not supported with sessions"),
        (params.structured_outputs is not None, "sampling_params.structured_outputs: not supported with sessions yet"),
        (
            params.max_tokens is None or params.max_tokens < 1,
            f"sampling_params.max_tokens: expected an integer >= 1, got {params.max_tokens}",
        ),
    )
    return tuple(message for is_refused, message in refused if is_refused)

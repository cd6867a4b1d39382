"""Which models sessions and policies refuse: each reason names a property of the model.

``model_errors`` reads the configuration, so it is asked before anything is loaded. What a configuration hides is found
in the KV cache that the model's layers ask for (``layer_errors``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpolicy.adapters.vllm.v0_28.startup.kv_spec import BoundedAttentionSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_LATENT = "multi-head latent attention"
_BOTH_WAYS = "attention in both directions"
_ENCODER = "an encoder and a decoder"
# Of the specs that say nothing more than what they are for.
_KINDS: dict[type[Any], str] = {
    MambaSpec: "layers with a state instead of attention (Mamba, linear attention, convolutions)",
    MLAAttentionSpec: _LATENT,
    SlidingWindowMLASpec: _LATENT,
    CrossAttentionSpec: _ENCODER,
    EncoderOnlyAttentionSpec: _BOTH_WAYS,
    SinkFullAttentionSpec: "sinks that are cache entries of the model's own",
    RSWASpec: "a sliding window over what is generated",
}


def model_errors(config: VllmConfig, features: str) -> tuple[str, ...]:
    """Return why a model cannot have sessions or policies, as far as its configuration says; empty if it can.

    Args:
        config: of the engine.
        features: those that were asked for, as the reasons name them.
    """
    model = config.model_config
    reasons = []
    if model.runner_type != "generate":
        reasons.append(f"a model that generates text is needed, got one for {model.runner_type}")
    reasons += [_other_attention(kind) for kind in _kinds(model)]
    # Where there is no attention there is nothing to rotate: that is one property, not two.
    if not model.is_attention_free:
        reasons += _position_errors(model)
    return tuple(f"--model {model.model}: {features}: {reason}" for reason in reasons)


def _kinds(model: ModelConfig) -> Iterator[str]:
    """Yield what a configuration has instead of full causal attention in every layer."""
    text = model.hf_text_config
    window = model.get_sliding_window()
    chunk = model.attention_chunk_size
    named = {
        "no attention": model.is_attention_free,
        "a hybrid model (layers with a state beside attention)": model.is_hybrid,
        _LATENT: model.use_mla,
        _ENCODER: model.is_encoder_decoder,
        "text that is denoised block by block": model.is_diffusion,
        f"a sliding window of {window}": window is not None,
        f"a sliding window over what is generated, of {model.rswa_window}": model.rswa_window is not None,
        f"attention in chunks of {chunk}": chunk is not None,
        "dual chunk attention": getattr(text, "dual_chunk_attention_config", None) is not None,
    }
    found = [kind for kind, is_so in named.items() if is_so]
    yield from found
    layer_types = sorted(set(getattr(text, "layer_types", None) or ()))
    # What was found is why there are several kinds.
    if not found and len(layer_types) > 1:
        yield f"layers of several kinds ({', '.join(layer_types)})"


def _position_errors(model: ModelConfig) -> Iterator[str]:
    """Yield why the positions of a model's tokens cannot be kept when entries before them are gone."""
    text = model.hf_text_config
    if model.uses_alibi:
        yield "rotary position embeddings are needed, got ALiBi (it counts the entries between two tokens)"
    # GPT-J rotates in every layer, but its configuration says only how many dimensions.
    elif not getattr(text, "rope_parameters", None) and text.model_type != "gptj":
        yield "rotary position embeddings are needed, its configuration has none (no rope_parameters)"
    if model.uses_mrope or model.uses_xdrope_dim > 0:
        yield "multi-dimensional RoPE is not supported yet"


def has_chunked_prefill(model: ModelConfig) -> bool:
    """Return whether chunked prefill is the user's choice: for some models vLLM itself turns it off.

    Those are refused for what they are, and not for a flag that nobody has typed.
    """
    return bool(model.is_chunked_prefill_supported) and not model.use_mla


def layer_errors(config: VllmConfig, kv_cache_config: KVCacheConfig, features: str) -> tuple[str, ...]:
    """Return why the model's layers cannot have sessions or policies, by the KV cache they ask for; empty if they can.

    Args:
        config: of the engine.
        kv_cache_config: of this process.
        features: those that were asked for, as the reasons name them.
    """
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in _specs_of(group.kv_cache_spec)]
    kinds = dict.fromkeys(kind for kind in map(_kind_of, specs) if kind is not None)
    reasons = [_other_attention(kind) for kind in kinds]
    if not reasons and len(groups) != 1:
        reasons.append(f"exactly 1 KV-cache group is needed, this model has {len(groups)}")
    elif not reasons and isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs):
        reasons.append("KV heads of one number and size in every layer are needed, this model has several")
    return tuple(f"--model {config.model_config.model}: {features}: {reason}" for reason in reasons)


def _other_attention(kind: str) -> str:
    return f"full causal attention is needed in every layer, got {kind}"


def _specs_of(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Return the specs of a group's layers: one stands for all of them, where they are equal."""
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _kind_of(spec: KVCacheSpec) -> str | None:
    """Return what a layer has instead of full causal attention; None if it has that."""
    kind = type(spec)
    if kind in _KINDS:
        return _KINDS[kind]
    if kind not in {FullAttentionSpec, BoundedAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec}:
        return f"{kind.__name__}, which kvpolicy does not know"
    # vLLM may give layers with a window or with chunks the cache of full attention.
    match spec:
        case SlidingWindowSpec(sliding_window=int(window)) | FullAttentionSpec(sliding_window=int(window)):
            return f"a sliding window of {window}"
        case (
            ChunkedLocalAttentionSpec(attention_chunk_size=int(chunk))
            | FullAttentionSpec(attention_chunk_size=int(chunk))
        ):
            return f"attention in chunks of {chunk}"
        case FullAttentionSpec(non_causal=True):
            return _BOTH_WAYS
    return None

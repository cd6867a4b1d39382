"""What a loaded model is, asked of its layers: what sessions and policies were not made for is refused.

A configuration says what a model's author wrote into it; the layers have what they will compute with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.rotary_embedding import (
    DualChunkRotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    Gemma4RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
    RotaryEmbedding,
    TeleChat3RoPEScaledRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.v1.attention.backend import AttentionType

from kvpolicy.adapters.vllm.v0_28.startup.position_limit import position_limit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from vllm.config import VllmConfig

_ROTARY = (RotaryEmbeddingBase, Phi3LongRoPEScaledRotaryEmbedding, DualChunkRotaryEmbedding)
# A row of their tables depends on the position alone. Subclasses are not meant: some read other rows.
_ONE_ROW_A_POSITION = frozenset(
    {
        DeepseekScalingRotaryEmbedding,
        DynamicNTKAlphaRotaryEmbedding,
        DynamicNTKScalingRotaryEmbedding,
        Gemma4RotaryEmbedding,
        LinearScalingRotaryEmbedding,
        Llama3RotaryEmbedding,
        NTKScalingRotaryEmbedding,
        RotaryEmbedding,
        TeleChat3RoPEScaledRotaryEmbedding,
        YaRNScalingRotaryEmbedding,
    }
)


def loaded_model_errors(model: nn.Module, config: VllmConfig) -> tuple[str, ...]:
    """Return why neither sessions nor policies can run with a loaded model; empty if they can.

    Raises:
        PolicyUsageError: the configuration itself is refused.
    """
    name = f"--model {config.model_config.model}"
    return tuple(
        dict.fromkeys(
            [
                *(
                    f"{name}: full causal attention over a cache of its own is needed in every layer, got {what}"
                    for what in _attention_errors(config)
                ),
                *(
                    f"{name}: rotary position embeddings are needed, got {what}"
                    for what in _rotary_errors(model, config)
                ),
            ]
        )
    )


def _attention_errors(config: VllmConfig) -> Iterator[str]:
    """Yield what the attention layers have that was not expected, with the first layer that has it.

    A soft cap of the logits is not in the way: it bends each logit by itself, whatever its position and however many
    there are.
    """
    layers = config.compilation_config.static_forward_context
    found: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if isinstance(layer, AttentionLayerBase):
            for what in _properties(layer):
                found.setdefault(what, []).append(name)
    for what, names in found.items():
        yield f"{what} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"


def _properties(layer: AttentionLayerBase) -> Iterator[str]:
    if type(layer) is not Attention:
        # Chunks, latent attention, encoders, cross attention, state spaces: each is a class of its own.
        yield f"a layer of type {type(layer).__name__}"
        return
    if layer.impl.alibi_slopes is not None:
        yield "ALiBi slopes"
    if layer.sliding_window is not None:
        yield f"a sliding window of {layer.sliding_window}"
    if layer.has_sink:
        yield "attention sinks of its own (learned logits)"
    if layer.attn_type != AttentionType.DECODER:
        yield f"attention of type {layer.attn_type}"
    if layer.kv_sharing_target_layer_name is not None:
        yield f"the keys and values of another layer ({layer.kv_sharing_target_layer_name})"


def _rotary_errors(model: nn.Module, config: VllmConfig) -> Iterator[str]:
    """Yield what is wrong with the rotary embeddings of the model's decoder."""
    # An image encoder has rotary embeddings as well, and positions of its own.
    decoder = model.get_language_model() if supports_multimodal(model) else model
    modules = [module for module in decoder.modules() if isinstance(module, _ROTARY)]
    if not modules:
        yield "none that is vLLM's own"
    limit = position_limit(config)
    for module in modules:
        rows = usable_rows(module)
        if rows is None:
            yield type(module).__name__
        elif rows < limit:
            yield f"{type(module).__name__} with {rows} rows where its configuration promises {limit} positions"


def usable_rows(module: nn.Module) -> int | None:
    """Return for how many positions a rotary module has a row; None: a row depends on more than the position."""
    if type(module) in _ONE_ROW_A_POSITION:
        return int(module.cos_sin_cache.shape[0])
    if type(module) is Phi3LongRoPEScaledRotaryEmbedding:
        num_short = int(module.original_max_position_embeddings)
        num_all = int(module.long_short_cos_sin_cache.shape[0])
        return num_all - num_short if module.use_long_rope else num_short
    return None

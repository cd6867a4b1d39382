"""Tiny random-weight models of other kinds than a plain Llama: other rotary tables, other attention.

As in ``tests.models``, the heavy packages are imported inside the functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.models import VOCAB_SIZE, random_model, tiny_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}
_SMALL_GATED: dict[str, Any] = _SMALL | {
    "intermediate_size": 256,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def longrope_phi3(folder: Path) -> Path:
    """Write a Phi-3 whose first 512 positions have factors of their own, in a table of two halves.

    An engine with a context limit of up to 512 reads the first half, which ends at position 511.
    """
    from transformers import Phi3Config, Phi3ForCausalLM

    tokenizer = tiny_tokenizer()
    scaling = {
        "type": "longrope",
        "short_factor": [1.0 + i / 16 for i in range(16)],
        "long_factor": [1.0 + i for i in range(16)],
    }
    config = Phi3Config(
        **_SMALL_GATED,
        **_special(tokenizer),
        sliding_window=None,
        original_max_position_embeddings=512,
        rope_scaling=scaling,
    )
    return random_model(folder, Phi3ForCausalLM(config), tokenizer)


def alibi_falcon(folder: Path) -> Path:
    """Write a Falcon with ALiBi; its configuration has rotary parameters all the same."""
    from transformers import FalconConfig, FalconForCausalLM

    tokenizer = tiny_tokenizer()
    config = FalconConfig(
        **_SMALL, **_special(tokenizer), alibi=True, multi_query=False, new_decoder_architecture=False, bias=False
    )
    return random_model(folder, FalconForCausalLM(config), tokenizer)


def capped_gemma2(folder: Path) -> Path:
    """Write a Gemma 2 with full attention in every layer, whose attention logits are bent towards +-2."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    tokenizer = tiny_tokenizer()
    config = Gemma2Config(
        **_SMALL_GATED | {"tie_word_embeddings": True},
        **_special(tokenizer),
        head_dim=32,
        query_pre_attn_scalar=32,
        layer_types=["full_attention"] * 2,
        sliding_window=None,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=None,
    )
    return random_model(folder, Gemma2ForCausalLM(config), tokenizer)


def _special(tokenizer: Any) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}

"""Tiny random-weight models for tests on the real engine: made on the spot, nothing is downloaded.

torch, transformers and tokenizers are imported inside the functions: this module can be imported (and
type-checked) in the light environment, which has none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

BOS_TOKEN = "<|start|>"
EOS_TOKEN = "<|im_end|>"
TURN_TOKEN = "<|im_start|>"
PAD_TOKEN = "<|pad|>"
SPECIAL_TOKENS = (BOS_TOKEN, EOS_TOKEN, TURN_TOKEN, PAD_TOKEN)

# One merge each, so that some tokens are two bytes long and a text has fewer tokens than bytes.
LETTER_PAIRS = (  # noqa: SIM905 - sixty quoted strings would be harder to read
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le "
    "ve co me de hi ri ro ic ne ea ra ce li ch ll be ma si om ur ca el ta la ns di fo ho pe ec"
).split()

# 4 special tokens + 256 bytes + 60 pairs.
VOCAB_SIZE = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 128,
    num_query_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 32,
    max_position_embeddings: int = 2048,
    weight_std: float = 0.1,
) -> Path:
    """Write a random-weight Llama with a byte-level tokenizer into ``folder`` and return ``folder``.

    The weights are normal with standard deviation ``weight_std``: large enough that greedy outputs vary and
    that attention is sharp, so a key rotated for a wrong position changes the log-probabilities visibly. At
    the default, over 1,500 random tokens, float32 log-probabilities are within 1.1e-5 of float64 ones, while
    a gap in the positions that is wrong by one moves some log-probability of every later position by more
    than 0.3; at 0.2 the rounding alone is 6e-5. The weights depend on the arguments only, not on the global
    generator. Everything is float32; the vocabulary has 320 tokens. A generated token may be the end token:
    pass ``ignore_eos=True`` where a reply must have an exact length.

    Args:
        folder: Where to write; made if missing.
        seed: Of the weights.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream; the MLP is twice as wide.
        num_query_heads: Attention heads of the queries.
        num_kv_heads: Heads of keys and values; must divide ``num_query_heads``.
        head_size: Elements per head.
        max_position_embeddings: The trained range that the config states.
        weight_std: Of every weight matrix, embeddings included. Norm weights are 1.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer(max_position_embeddings)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_query_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    _write(LlamaForCausalLM(config), tokenizer, folder, seed=seed, weight_std=weight_std)
    return folder


def tiny_gptj(folder: Path, *, max_position_embeddings: int = 512) -> Path:
    """Write a GPT-J with random float32 weights (2 layers, 4 heads of 32, 16 of them rotated) and return ``folder``.

    Its keys are rotated in neighbouring pairs and in part, and its configuration has no ``rope_parameters``.

    Args:
        folder: Where to write; made if missing.
        max_position_embeddings: The trained range that the config states.
    """
    from transformers import GPTJConfig, GPTJForCausalLM

    tokenizer = tiny_tokenizer(max_position_embeddings)
    config = GPTJConfig(
        vocab_size=VOCAB_SIZE,
        n_positions=max_position_embeddings,
        n_embd=128,
        n_layer=2,
        n_head=4,
        rotary_dim=16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    _write(GPTJForCausalLM(config), tokenizer, folder, seed=0, weight_std=0.1)
    return folder


def _write(model: Any, tokenizer: Any, folder: Path, *, seed: int, weight_std: float) -> None:
    """Give a model random weights (those of norms are 1) and write it with its tokenizer."""
    import torch
    from transformers import GenerationConfig

    model.to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters(), key=lambda named: named[0]):
            if weight.dim() > 1 or name.endswith("bias"):
                weight.normal_(0.0, weight_std, generator=generator)
            else:
                weight.fill_(1.0)
    # Greedy by default: vLLM takes its sampling defaults from this file.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def echo_llama(folder: Path, *, max_position_embeddings: int = 2048) -> Path:
    """Write a Llama that says ``successor`` of the last token, whatever came before it, and return ``folder``.

    Attention and MLP add nothing to the residual stream, so the model has no memory: a reply says which token its
    chunk ended with, and nothing that happens to the KV cache can change it. The embedding of a token is a unit
    vector of its own and the head maps it to the successor, so that the greedy logit is sqrt(320), about 17.9, and
    every other one is 0: nothing is left to rounding. The keys and values are those of ``tiny_llama``'s random
    weights.

    Args:
        folder: Where to write; made if missing.
        max_position_embeddings: The trained range that the config states.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tiny_llama(folder, hidden_size=VOCAB_SIZE, max_position_embeddings=max_position_embeddings)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    weights["model.embed_tokens.weight"] = torch.eye(VOCAB_SIZE)
    head = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for token in range(VOCAB_SIZE):
        head[successor(token), token] = 1.0
    weights["lm_head.weight"] = head
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def successor(token: int) -> int:
    """Return what ``echo_llama`` says after a token: the next ordinary token, the first one after the last.

    Worked example: 4 follows 319, 5 follows 4; a special token is never said.
    """
    first = len(SPECIAL_TOKENS)
    return first + (token + 1 - first) % (VOCAB_SIZE - first)


def tiny_tokenizer(max_length: int = 2048) -> Any:
    """Return a byte-level BPE tokenizer of 320 tokens with a chat template; it adds no token of its own.

    Args:
        max_length: ``model_max_length`` of the tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *LETTER_PAIRS]
    vocabulary = {word: index for index, word in enumerate(words)}
    if len(vocabulary) != VOCAB_SIZE:
        message = f"the tiny vocabulary has {len(vocabulary)} distinct tokens, expected {VOCAB_SIZE}"
        raise ValueError(message)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[(pair[0], pair[1]) for pair in LETTER_PAIRS]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[TURN_TOKEN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )

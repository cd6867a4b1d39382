"""An independent forward pass for compacted generations: Hugging Face, with a mask for every layer and KV head.

It never drops or moves anything: the whole sequence is computed at once, teacher-forced, and each query sees exactly
the keys that the policy had kept in that layer and KV head when the query's token was written. If each of the engine's
tokens is the most likely one given those before it, then greedy decoding here gives the same text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from kvpolicy.core.compaction import expand, retained_positions
from kvpolicy.core.policies import RequestSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvpolicy.core.policies import KVPolicy

_NAME = "kvpolicy_oracle"


class GenerationOracle:
    """The model, with attention that looks its mask up by layer."""

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        AttentionInterface.register(_NAME, self._attend)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=_NAME).eval()
        self.num_layers = self._model.config.num_hidden_layers
        config = self._model.config
        # GPT-J has no other number: each query head has its own keys.
        self.num_kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        self._visible = torch.empty(0)

    def logprobs(self, tokens: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities after every token, shape (num_tokens, vocabulary).

        Args:
            tokens: prompt and reply.
            visible: bool, shape (num_layers, num_kv_heads, query, key).
        """
        self._visible = visible
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits
        return torch.log_softmax(logits[0].double(), dim=-1)

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        scaling: float,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        # (1, heads, tokens, dim); query heads of one KV head are neighbours.
        group = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        hidden = ~self._visible[module.layer_idx].repeat_interleave(group, dim=0)
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return (weights @ value).transpose(1, 2).contiguous(), None


Perturb = "Callable[[CompactionEvent, int, int, tuple[int, ...]], tuple[int, ...]]"


def visible_keys(
    policy: KVPolicy | None,
    *,
    request_key: str,
    prompt_length: int,
    num_tokens: int,
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    perturb: Any = None,
) -> tuple[torch.Tensor, int, int]:
    """Return what each query sees (bool: layer, KV head, query, key), the number of events, and the most ever held.

    ``perturb`` may change what a head holds after an event: (event, layer, KV head, positions) -> positions.
    """
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    visible = causal.expand(num_layers, num_kv_heads, -1, -1).clone()
    if policy is None:
        return visible, 0, num_tokens
    visible[:, :, prompt_length:] = False
    held: dict[tuple[int, int], tuple[int, ...]] = {
        (layer, head): tuple(range(prompt_length)) for layer in range(num_layers) for head in range(num_kv_heads)
    }
    num_events, peak = 0, prompt_length
    for query in range(prompt_length, num_tokens):
        lengths = {len(positions) for positions in held.values()}
        assert len(lengths) == 1
        peak = max(peak, *lengths)
        event = policy.event_for(
            RequestSnapshot(
                request_key=request_key,
                prompt_length=prompt_length,
                logical_length=query,
                physical_length=lengths.pop(),
                num_events=num_events,
                block_size=block_size,
            )
        )
        if event is not None:
            num_events += 1
            for (layer, head), positions in held.items():
                after: tuple[int, ...] = retained_positions(event, expand(event, layer, head), positions)  # type: ignore[arg-type]
                held[layer, head] = perturb(event, layer, head, after) if perturb is not None else after
        for (layer, head), positions in held.items():
            held[layer, head] = (*positions, query)
            visible[layer, head, query, list(held[layer, head])] = True
    return visible, num_events, peak

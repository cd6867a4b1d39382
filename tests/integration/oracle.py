"""An independent forward pass: Hugging Face in float32, a cache that is cut in the middle, explicit position ids.

It shares no code with the engine or with kvpolicy. Keys in the cache carry their rotation already, so cutting the cache
leaves the survivors' rotation alone; the mask is given explicitly, so positions decide nothing but the rotation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Oracle:
    """The state of one session: the tokens in the cache, and the position of the next one."""

    def __init__(self, model: Path, **config: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager", **config
        ).eval()
        self.restart()

    def restart(self) -> None:
        """Forget everything: the cache is empty and positions begin at 0 again."""
        self._cache = DynamicCache()
        self.logits = torch.empty(0)
        self.tokens: list[int] = []
        self.next_position = 0

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute tokens on top of the cache; return the log-probabilities after the last one, shape (vocabulary,)."""
        num_held, num_new = len(self.tokens), len(tokens)
        positions = torch.arange(self.next_position, self.next_position + num_new).unsqueeze(0)
        mask = torch.full((num_new, num_held + num_new), 0.0)
        mask[:, num_held:] = torch.full((num_new, num_new), torch.finfo(torch.float32).min).triu(1)
        with torch.inference_mode():
            logits = self._model(
                input_ids=torch.tensor([list(tokens)]),
                position_ids=positions,
                attention_mask=mask[None, None],
                cache=self._cache,
                use_cache=True,
            ).logits
        self.tokens += tokens
        self.next_position += num_new
        self.logits = logits[0, -1].double()
        return torch.log_softmax(logits[0, -1].double(), dim=-1)

    def cut(self, start: int, end: int) -> None:
        """Remove the entries ``[start, end)`` (ranks in the cache); the others keep their positions."""
        for layer in self._cache.layers:
            layer.keys = torch.cat([layer.keys[:, :, :start], layer.keys[:, :, end:]], dim=2)
            layer.values = torch.cat([layer.values[:, :, :start], layer.values[:, :, end:]], dim=2)
        del self.tokens[start:end]

    def recompute(self) -> torch.Tensor:
        """Compute everything that is held anew, with positions from 0."""
        tokens = self.tokens
        self.restart()
        return self.feed(tokens)


def largest_difference(logprobs: torch.Tensor, engine: Mapping[int, float]) -> float:
    """Return the largest difference over the log-probabilities that the engine reported for one step."""
    return max(abs(float(logprobs[token]) - value) for token, value in engine.items())

"""What of a request would end the engine for everybody: found before it is sent, and once more before it is scheduled.

vLLM looks tokens up in tensors with a row for each token of the model's vocabulary, and compares what it is given with
another bound (the tokenizer's) or with none. Outside of them the worker raises, and an engine whose worker has raised
is gone.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from copy import copy
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from kvpolicy.adapters.vllm.v0_28.wire import rehearse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.config import ModelConfig

# Token ids travel in arrays of 32 bits: the bound where a model states no vocabulary.
_MOST_TOKEN_IDS = 1 << 31
_MESSAGE_BITS = 64


@frozen(kw_only=True)
class RequestGuard:
    """The sizes of one model that requests must respect.

    Attributes:
        num_token_ids: rows of the model's embedding and logits, those that pad them to a round number left out. The
            tokenizer's vocabulary may be larger or smaller.
        hidden_size: width of an embedding.
    """

    num_token_ids: int
    hidden_size: int

    @classmethod
    def of(cls, config: ModelConfig) -> RequestGuard:
        """Return the guard of a model."""
        return cls(
            num_token_ids=int(config.get_vocab_size()) or _MOST_TOKEN_IDS, hidden_size=int(config.get_hidden_size())
        )

    def errors(self, request: Any) -> tuple[str, ...]:
        """Return why a request would end the engine; empty if it would not.

        ``request`` is one as it is sent (``EngineCoreRequest``) or one as it is scheduled (``Request``).
        """
        return (*self._prompt_errors(request), *self.parameter_errors(request.sampling_params))

    def token_errors(self, name: str, tokens: Any) -> tuple[str, ...]:
        """Return the complaint about ``name``, which must be token ids of the model; empty if they are."""
        if not isinstance(tokens, Iterable):
            return (self._complaint(name, tokens),)
        tokens = list(tokens)
        # A long prompt is looked at once for each question, and not once for each token.
        if set(map(type, tokens)) <= {int} and (not tokens or (min(tokens) >= 0 and max(tokens) < self.num_token_ids)):
            return ()
        odd = next(token for token in tokens if type(token) is not int or not 0 <= token < self.num_token_ids)
        return (self._complaint(name, odd),)

    def parameter_errors(self, params: Any, *, in_session: bool = False) -> tuple[str, ...]:
        """Return why the worker could not sample with these parameters; empty if it could, or if they are others.

        The tokens that end a reply are looked up with ``min_tokens`` only. ``in_session``: what the caller names must
        exist anyway.
        """
        if not isinstance(params, SamplingParams):
            return ()
        named: dict[str, Any] = {
            "allowed_token_ids": params.allowed_token_ids,
            "logit_bias": params.logit_bias,
            "logprob_token_ids": params.logprob_token_ids,
        }
        if in_session:
            named["stop_token_ids"] = params.stop_token_ids
        elif params.min_tokens:
            # The model's own ones are among them.
            named["min_tokens with stop_token_ids or the model's end tokens"] = params.all_stop_token_ids
        return tuple(
            error
            for name, tokens in named.items()
            if tokens is not None
            for error in self.token_errors(f"sampling_params.{name}", tokens)
        )

    def _prompt_errors(self, request: Any) -> Iterator[str]:
        embeds, mask = request.prompt_embeds, request.prompt_is_token_ids
        if embeds is not None and (
            embeds.layout is not torch.strided or tuple(embeds.shape[1:]) != (self.hidden_size,)
        ):
            yield (
                f"prompt_embeds: expected a dense tensor of shape (tokens, {self.hidden_size}), "
                f"got {tuple(embeds.shape)}, {embeds.layout}"
            )
        tokens = request.prompt_token_ids
        if tokens is None:
            return
        if mask is not None and len(mask) != len(tokens):
            yield f"prompt_is_token_ids: expected one value for each of {len(tokens)} tokens, got {len(mask)}"
            return
        yield from self.token_errors("prompt", _looked_up(tokens, mask, request.mm_features or ()))

    def _complaint(self, name: str, got: object) -> str:
        is_long = isinstance(got, int) and got.bit_length() > _MESSAGE_BITS
        shown = f"an integer of {got.bit_length()} bits" if is_long else reprlib.repr(got)  # type: ignore[attr-defined]
        return f"{name}: expected token ids from 0 to {self.num_token_ids - 1} (the model's vocabulary), got {shown}"


def _looked_up(tokens: Sequence[Any], mask: Sequence[bool] | None, features: Sequence[Any]) -> Sequence[Any]:
    """Return the tokens whose embedding is looked up: the others stand where embeddings come with the request."""
    if mask is None and not features:
        return tokens
    is_looked_up = [True] * len(tokens) if mask is None else list(mask)
    for feature in features:
        start, length = feature.mm_position.offset, feature.mm_position.length
        is_looked_up[start : start + length] = [False] * length
    return list(compress(tokens, is_looked_up))


def reading_errors(request: EngineCoreRequest) -> tuple[str, ...]:
    """Return why the engine could not read a request, apart from its prompt; empty if it could.

    A value of another type than vLLM declares ends the thread that reads for everybody.
    """
    light = copy(request)
    light.prompt_token_ids = light.prompt_embeds = light.mm_features = None
    if isinstance(getattr(light.sampling_params, "extra_args", None), dict):
        # Read as whatever they are; what cannot be sent is the caller's trouble alone.
        light.sampling_params = copy(light.sampling_params)
        light.sampling_params.extra_args = None
    try:
        rehearse(light)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        fields = EngineCoreRequest.__struct_fields__
        return (re.sub(r"\$\[(\d+)\]", lambda match: fields[int(match[1])], f"request: {error}"),)
    return ()

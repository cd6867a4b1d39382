"""Sampling parameters from a mapping that anybody may have sent: every reason at once, and nothing that could hurt."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams

from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# What the engine, or the session itself, sets; the rest of vLLM's fields are the caller's.
_NOT_THE_CALLERS = frozenset(
    {"output_kind", "skip_clone", "output_text_buffer_length", "detokenize", "flat_logprobs", "extra_args"}
    | {"routed_experts_prompt_start", "stream_interval"}
)
_TYPES = {
    field.name: field.type
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in _NOT_THE_CALLERS and not field.name.startswith("_")
}
SAMPLING_FIELDS = tuple(sorted(_TYPES))
"""Names of the fields that a request may bring."""
# Numbers travel to the engine, and into its tensors, as 64-bit integers.
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def sampling_params_from(mapping: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters that a mapping (a JSON object, say) describes.

    Args:
        mapping: fields of vLLM's ``SamplingParams``.
        defaults: of what is left out, where vLLM's own are not wanted.

    Raises:
        PolicyUsageError: unknown fields, wrong types and impossible values, all at once.
    """
    reasons: list[str] = []
    values = dict(defaults)
    for name, value in mapping.items():
        if name not in _TYPES:
            # They are too many for a message.
            reasons.append(f"sampling.{name}: unknown field; sampling_fields of GET /v1/streaming/config has the known")
            continue
        try:
            # JSON has text for keys only.
            values[name] = msgspec.convert(value, _TYPES[name], str_keys=True)
        except (ValueError, VLLMClientError) as error:
            reasons.append(f"sampling.{name}: {_lower_first(str(error))}")
            continue
        reasons += [f"sampling.{name}: {reason}" for reason in _number_errors(value)]
    if reasons:
        raise PolicyUsageError(reasons)
    try:
        return SamplingParams(**values)
    except (ValueError, VLLMClientError) as error:
        raise PolicyUsageError(f"sampling: {error}") from error


def _number_errors(value: object) -> Iterator[str]:
    """Yield what is wrong with the numbers in a JSON value."""
    match value:
        case float() if not math.isfinite(value):
            yield f"expected finite numbers, got {value!r}"
        case int() if not _LEAST <= value <= _MOST:
            yield f"expected integers of 64 bits, got {value}"
        case dict():
            for part in value.values():
                yield from _number_errors(part)
        case list() | tuple():
            for part in value:
                yield from _number_errors(part)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]

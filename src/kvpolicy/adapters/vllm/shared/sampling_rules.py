"""Which sampling parameters a session's chunk cannot have: every reason at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams

from kvpolicy.adapters.vllm.shared.options import POLICY_KEY
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.policies import built_in_policies
from kvpolicy.core.policy_options import policy_from

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    return tuple(message for is_refused, message in refused if is_refused)


def _is_policy(value: object) -> bool:
    """Whether a request asks for a policy: for anything but nothing and "off", in whatever form."""
    try:
        return policy_from(value, built_in_policies()) is not None
    except PolicyUsageError:
        return True

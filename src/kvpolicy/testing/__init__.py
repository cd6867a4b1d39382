"""For authors of policies: one call that tests a policy against what engines rely on.

It needs neither an engine nor a test framework, and draws nothing at random: a policy passes always or never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.testing.comparison import check_keys, check_repeated, check_served
from kvpolicy.testing.findings import RULES, Findings, PolicyConformanceError
from kvpolicy.testing.generation import Generation
from kvpolicy.testing.prompts import accepted_prompts, longest_prompt
from kvpolicy.testing.value import twin_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpolicy.core.policies import KVPolicy

__all__ = ["RULES", "PolicyConformanceError", "check_policy"]

_BEYOND_EVERY_BUDGET = 1 << 40


def check_policy(  # noqa: PLR0913 - what is tested, each with a default
    policy: KVPolicy,
    *,
    prompt_lengths: Sequence[int] = (1, 2, 15, 16, 17, 100),
    block_sizes: Sequence[int] = (1, 4, 16),
    request_keys: Sequence[str] = ("a", "b"),
    num_events: int = 5,
    max_length: int = 8192,
) -> None:
    """Drive a policy through generations as an engine does, and raise if it breaks one of the ``RULES``.

    Each generation goes from its prompt up to the event ``num_events``, in every combination of the arguments; the
    longest prompt up to ``max_length`` that the policy takes is added. What ``expand`` makes of the events is checked
    for two KV heads.

    Args:
        policy: what to test. It should have small budgets: up to ``max_length`` entries are simulated.
        prompt_lengths: prompts to try; those that the policy refuses are left out.
        block_sizes: block sizes of the engine to try.
        request_keys: requests to try; at least two, so that they can be told apart.
        num_events: events per generation.
        max_length: logical length at which a generation ends in any case.

    Raises:
        PolicyConformanceError: naming every broken rule, with the first place where it was broken.
        PolicyUsageError: fewer than two request keys.
    """
    if len(set(request_keys)) < 2:  # noqa: PLR2004 - a pair
        raise PolicyUsageError(f"request_keys: expected at least two different ones, got {tuple(request_keys)!r}")
    findings = Findings()
    twin = twin_of(policy, findings)
    generations: list[Generation] = []
    for block_size in block_sizes:
        prompts = accepted_prompts(policy, block_size, {*prompt_lengths, max_length, _BEYOND_EVERY_BUDGET}, findings)
        longest = longest_prompt(policy, block_size, max(prompts, default=0), max_length)
        for prompt_length in sorted({prompt for prompt in prompts if prompt < max_length} | longest):
            for key in request_keys:
                generation = Generation(policy, findings, prompt_length, block_size, key)
                generation.run(num_events, max_length)
                generations.append(generation)
    check_served(generations, findings, max_length)
    check_repeated(policy, twin, generations, findings)
    check_keys(policy, generations)
    if findings.lines:
        raise PolicyConformanceError(repr(policy), findings.lines)

"""Which prompts a policy takes, and how it refuses the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.policies import RequestSnapshot
from kvpolicy.testing.calls import Failure, ask, schedule_of

if TYPE_CHECKING:
    from kvpolicy.core.policies import KVPolicy
    from kvpolicy.testing.findings import Findings


def accepted_prompts(policy: KVPolicy, block_size: int, prompts: set[int], findings: Findings) -> set[int]:
    """Return the prompts that the policy takes, as it may refuse some."""
    accepted = set()
    for prompt_length in sorted(prompts):
        where = f"prompt {prompt_length}, block size {block_size}"
        schedule = schedule_of(policy, prompt_length, block_size)
        if not isinstance(schedule, Failure):
            accepted.add(prompt_length)
            continue
        snapshot = RequestSnapshot(
            request_key="a",
            prompt_length=prompt_length,
            logical_length=prompt_length,
            physical_length=prompt_length,
            block_size=block_size,
        )
        for method, answer in (("schedule", schedule), ("event_for", ask(policy, snapshot))):
            if not (isinstance(answer, Failure) and issubclass(answer.kind, PolicyUsageError)):
                expected = "PolicyUsageError for a prompt that the policy does not take"
                findings.add("serves", f"{where}: expected {expected} from {method}, got {answer!r}")
    return accepted


def longest_prompt(policy: KVPolicy, block_size: int, accepted: int, limit: int) -> set[int]:
    """Return the longest prompt that the policy takes, if it takes some and refuses ``limit``."""
    if not 0 < accepted < limit:
        return set()
    refused = limit
    while refused - accepted > 1:
        middle = (accepted + refused) // 2
        if isinstance(schedule_of(policy, middle, block_size), Failure):
            refused = middle
        else:
            accepted = middle
    return {accepted}

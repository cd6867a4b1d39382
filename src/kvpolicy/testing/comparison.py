"""Several generations compared, and asked again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.core.draws import RingDraw
from kvpolicy.testing.calls import ask

if TYPE_CHECKING:
    from kvpolicy.core.compaction import CompactionEvent
    from kvpolicy.core.policies import KVPolicy
    from kvpolicy.testing.findings import Findings
    from kvpolicy.testing.generation import Generation


def check_served(generations: list[Generation], findings: Findings, max_length: int) -> None:
    """Note it if nothing could be tested."""
    if not generations:
        findings.add(
            "serves", f"expected to take a prompt below {max_length} entries, got none; pass other prompt_lengths"
        )
    elif not any(generation.events or generation.is_broken for generation in generations):
        findings.add(
            "progress",
            f"expected an event within {max_length} entries, got none, so no event was tested; pass a policy with a "
            "smaller budget, or a larger max_length",
        )


def check_repeated(policy: KVPolicy, twin: KVPolicy, generations: list[Generation], findings: Findings) -> None:
    """Ask everything again, last things first, and ask the copy in another process's stead, too."""
    for generation in reversed(generations):
        for snapshot, answer in reversed(generation.answers):
            for name, asked in (("the policy", policy), ("its pickled copy", twin)):
                if (again := ask(asked, snapshot)) != answer:
                    findings.add("pure", f"{snapshot!r}: expected {answer!r} again from {name}, got {again!r}")


def check_keys(policy: KVPolicy, generations: list[Generation]) -> None:
    """Compare the keys of random draws: one per request, each request's and each seed's its own."""
    owners: dict[tuple[int, int], str] = {}
    for generation in generations:
        random = [event for event in generation.events if not isinstance(event.draw, RingDraw)]
        keys = {event.key for event in random}
        if len(keys) > 1:
            generation.add("key", f"expected one key for all events, got {sorted(keys)}")
        for key in keys:
            owner = owners.setdefault(key, generation.request_key)
            if owner != generation.request_key:
                generation.add("key", f"expected another key than that of request {owner!r}, got {key}")
        for event in random:
            _check_seed(policy, generation, event)


def _check_seed(policy: Any, generation: Generation, event: CompactionEvent) -> None:  # noqa: ANN401 - with a seed
    """Compare an event with that of another seed, where a policy has one (an attrs field of that name)."""
    if not attrs.has(type(policy)) or "seed" not in attrs.fields_dict(type(policy)):
        return
    other = attrs.evolve(policy, seed=policy.seed ^ 1)
    for snapshot, answer in generation.answers:
        if answer is event and getattr(ask(other, snapshot), "key", None) == event.key:
            generation.add("key", f"expected the seed {other.seed} to give another key than {policy.seed}")

"""The rules for policies, and what was found against them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import Factory, define

if TYPE_CHECKING:
    from collections.abc import Sequence

RULES = {
    "picklable": "a policy is sent to other processes, and is equal there",
    "immutable": "a policy is a hashable value that nothing can change",
    "serves": "a policy takes prompts, or refuses them with PolicyUsageError from both of its methods",
    "schedule": "schedule returns an EventSchedule whose first event comes after the prompt",
    "pure": "the same arguments give the same answer, whatever was asked before",
    "due": "event_for returns an event at the logical lengths that its schedule names, once, and at no others",
    "agreement": "an event has the ordinal and the lengths of the snapshot, and drops what its schedule says",
    "peak": "a request never holds more than the peak of its schedule",
    "prompt": "every prompt entry stays, in its cell",
    "newest": "the num_protected newest entries are in the last cells when an event comes, and stay",
    "draw": "an event's draw is one of the closed set; a BlockDraw has the snapshot's block size",
    "expand": "every event can be expanded, drops exactly num_dropped entries and loses no others",
    "key": "random draws have one key per request, which differs between requests and between seeds",
    "progress": "events come within max_length entries",
}
"""What ``check_policy`` tests, by the name that its messages begin with."""


class PolicyConformanceError(AssertionError):
    """A policy breaks rules. ``broken`` holds one line for each of them, which begins with the rule's name."""

    def __init__(self, policy: str, broken: Sequence[str]) -> None:
        self.policy = policy
        self.broken = tuple(broken)
        super().__init__(policy, self.broken)

    def __str__(self) -> str:
        return "\n  ".join([f"{self.policy} breaks {len(self.broken)} of the rules for policies:", *self.broken])


@define
class Findings:
    """The first finding for each broken rule, and how many there were."""

    _found: dict[str, list[str]] = Factory(dict)

    def add(self, rule: str, detail: str) -> None:
        """Note a broken rule."""
        self._found.setdefault(rule, []).append(detail)

    @property
    def lines(self) -> tuple[str, ...]:
        """One line per broken rule, in the order of the rules."""
        return tuple(
            f"{rule} ({meaning}): {details[0]}" + (f" (and {len(details) - 1} more)" if len(details) > 1 else "")
            for rule, meaning in RULES.items()
            if (details := self._found.get(rule))
        )

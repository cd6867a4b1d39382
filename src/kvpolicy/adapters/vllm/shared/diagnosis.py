"""What ``kvpolicy doctor`` finds out. A value; imports neither vLLM nor torch."""

from __future__ import annotations

from attrs import frozen


@frozen
class Fact:
    """One thing that was looked at, what was found, and whether that is as it should be."""

    name: str
    found: str
    is_good: bool = True


@frozen(kw_only=True)
class Verdict:
    """Whether one of the two things that kvpolicy does would work; every reason why not."""

    name: str
    is_asked_for: bool
    reasons: tuple[str, ...]


@frozen(kw_only=True)
class Diagnosis:
    """What an installation, and a model in it, supports."""

    facts: tuple[Fact, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def is_good(self) -> bool:
        """Whether everything that was asked for would work."""
        return not any(verdict.reasons for verdict in self.verdicts if verdict.is_asked_for)

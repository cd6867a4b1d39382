"""Calls of a policy's methods. What they raise is an answer, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from kvpolicy.core.policies import KVPolicy, RequestSnapshot


@frozen
class Failure:
    """What a call raised. Two are equal if their texts are."""

    kind: type
    text: str

    def __repr__(self) -> str:
        return f"{self.kind.__name__}: {self.text}"


def ask(policy: KVPolicy, snapshot: RequestSnapshot) -> Any:  # noqa: ANN401 - whatever a policy returns
    """Return what event_for returns or raises."""
    try:
        return policy.event_for(snapshot)
    except Exception as error:  # noqa: BLE001 - whatever a policy raises is a finding
        return Failure(type(error), str(error))


def schedule_of(policy: KVPolicy, prompt_length: int, block_size: int) -> Any:  # noqa: ANN401 - likewise
    """Return what schedule returns or raises."""
    try:
        return policy.schedule(prompt_length, block_size=block_size)
    except Exception as error:  # noqa: BLE001 - likewise
        return Failure(type(error), str(error))

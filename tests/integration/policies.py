"""Policies as somebody else might write them; engines import them by ``tests.integration.policies:Name``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve

from kvpolicy.core.policies import RandKV
from kvpolicy.core.schedule import EventSchedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpolicy.core.policies import KVPolicy


class _Broken(RandKV):
    def event_for(self, snapshot: Any) -> Any:
        raise ArithmeticError(f"event {snapshot.num_events}")


def Broken(options: Mapping[str, Any]) -> KVPolicy:  # noqa: N802 - named like a class, which it stands for
    """Return a policy whose first event fails."""
    return _Broken.from_mapping(options)


class _BrokenSchedule(RandKV):
    def schedule(self, prompt_length: int, *, block_size: int) -> Any:
        raise ArithmeticError(f"{prompt_length} in {block_size}")


def BrokenSchedule(options: Mapping[str, Any]) -> KVPolicy:  # noqa: N802 - likewise
    """Return a policy that fails when it is asked when it acts."""
    return _BrokenSchedule.from_mapping(options)


def KeyErrors(options: Mapping[str, Any]) -> KVPolicy:  # noqa: N802 - likewise
    """Turn down options as no factory should."""
    raise KeyError(str(options))


class _WrongEvent(RandKV):
    def event_for(self, snapshot: Any) -> Any:
        event = super().event_for(snapshot)
        return None if event is None else evolve(event, physical_length=event.physical_length + 64)


def WrongEvent(options: Mapping[str, Any]) -> KVPolicy:  # noqa: N802 - likewise
    """Return a policy whose events speak of more entries than there are."""
    return _WrongEvent.from_mapping(options)


class _TooEarly(RandKV):
    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:  # noqa: ARG002 - the port's
        return EventSchedule(first_due=prompt_length, interval=8, first_dropped=1)


def TooEarly(options: Mapping[str, Any]) -> KVPolicy:  # noqa: N802 - likewise
    """Return a policy that wants to compact a prompt."""
    return _TooEarly.from_mapping(options)

"""Policies as somebody else might write them; engines import them by ``tests.integration.policies:Name``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpolicy.core.policies import RandKV

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

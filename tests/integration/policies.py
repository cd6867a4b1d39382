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

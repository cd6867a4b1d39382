"""A policy as a value: immutable, and equal to what another process gets."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpolicy.core.policies import KVPolicy
    from kvpolicy.testing.findings import Findings


def twin_of(policy: KVPolicy, findings: Findings) -> KVPolicy:
    """Return the policy as another process gets it; itself, where it cannot be sent."""
    _check_immutable(policy, findings)
    try:
        twin: KVPolicy = pickle.loads(pickle.dumps(policy))  # noqa: S301 - what was dumped here
    except Exception as error:  # noqa: BLE001 - pickling raises all kinds of them
        findings.add("picklable", f"{type(error).__name__}: {error}")
        return policy
    if twin != policy:
        findings.add("picklable", f"expected a copy that is equal to {policy!r}, got {twin!r}")
    return twin


def _check_immutable(policy: KVPolicy, findings: Findings) -> None:
    try:
        hash(policy)
    except TypeError as error:
        findings.add("immutable", f"{error}; a frozen attrs class or dataclass of hashable values will do")
    for name in _field_names(policy):
        try:
            setattr(policy, name, getattr(policy, name))
        except AttributeError:
            continue
        findings.add("immutable", f"expected an error when {name!r} is set, got none")


def _field_names(policy: KVPolicy) -> list[str]:
    """Return the names of what an instance holds, in a dictionary or in slots."""
    slots = [name for kind in type(policy).__mro__ for name in _slots(kind) if hasattr(policy, name)]
    return [*getattr(policy, "__dict__", {}), *(name for name in slots if not name.startswith("__"))]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)

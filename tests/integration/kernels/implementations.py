"""The implementations of each op, by name: asking for one that is not there raises."""

from __future__ import annotations

from importlib import import_module
from typing import Any

NAMES = ("reference", "torch", "compiled")
FAST = ("torch", "compiled")


def expand_moves(name: str) -> Any:
    """Return one implementation of the op ``expand``."""
    return import_module(f"kvpolicy.kernels.expand.{name}").expand_moves


def relocate(name: str) -> Any:
    """Return one implementation of the op ``relocate``."""
    return import_module(f"kvpolicy.kernels.relocate.{name}").relocate

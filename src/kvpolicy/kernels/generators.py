"""Random generators of requests."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, MutableMapping


def seeded_generator(seed: int | None, device: torch.device) -> torch.Generator | None:
    """Return a generator that starts at ``seed``, or None where there is no seed (the engine's own is used then)."""
    if seed is None:
        return None
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    return generator


@contextmanager
def not_advanced(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Leave generators as they were before, however much was drawn from them meanwhile."""
    states = [(generator, generator.get_state()) for generator in generators]
    yield
    for generator, state in states:
        generator.set_state(state)


@contextmanager
def without_rows(generators: MutableMapping[int, torch.Generator], rows: Iterable[int]) -> Iterator[None]:
    """Take the generators of some rows of a batch out of it, and put them back afterwards."""
    kept = {row: generators.pop(row) for row in rows}
    try:
        yield
    finally:
        generators.update(kept)

"""Random generators of requests."""

from __future__ import annotations

import torch


def seeded_generator(seed: int | None, device: torch.device) -> torch.Generator | None:
    """Return a generator that starts at ``seed``, or None where there is no seed (the engine's own is used then)."""
    if seed is None:
        return None
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    return generator

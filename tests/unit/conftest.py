"""What all unit tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop that async tests run in."""
    return "asyncio"

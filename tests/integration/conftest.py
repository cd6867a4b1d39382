"""Shared models and engines of the integration tests: each is made once per module or session."""

from __future__ import annotations

import asyncio
import os

import pytest

# Read when vllm is first imported. Engines made in this process keep their worker here, so that a test can step
# them and look inside; AsyncLLM always has an engine process of its own.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models gain nothing from a second thread, and threads that wait for a busy core lose a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import TYPE_CHECKING

from tests.models import tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama of 2 layers, trained range 2048."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def short_range_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a trained range of 512 positions, so that consolidation comes soon."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "short", max_position_embeddings=512)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for the tests of a module: an engine belongs to the loop that it was made in."""
    with asyncio.Runner() as runner:
        yield runner


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors in our code; those that the engine's packages raise in their own are theirs."""
    for package in ("torch", "vllm", "transformers", "torchao", "importlib", "cpuinfo", "triton", "xgrammar"):
        config.addinivalue_line("filterwarnings", rf"ignore:::{package}(\.|$)")

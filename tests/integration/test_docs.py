"""The Python of the README and of docs/ that needs an engine, on one engine with a tiny model."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvpolicy.adapters import vllm as adapter
from kvpolicy.adapters.vllm import LLM, AsyncLLM
from kvpolicy.adapters.vllm.v0_28.startup.engine_args import checked_config, policy_arguments
from tests.models import tiny_llama
from tests.pages import ROOT, Block, python_blocks, python_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# What pages may say of the engine that they make; what they leave out is the test's affair.
SHARED: dict[str, Any] = {"max_model_len": 8192, "block_size": 32, "max_num_seqs": 8, "max_sessions": 2}
UNSEEN: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 28,
    "num_gpu_blocks_override": 400,
    "enforce_eager": True,
}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the trained range that the pages speak of."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "docs", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def engine(runner: asyncio.Runner, model: Path) -> Iterator[AsyncLLM]:
    async def start() -> AsyncLLM:
        return AsyncLLM(model=str(model), **SHARED, **UNSEEN)

    engine = runner.run(start())
    yield engine
    engine.shutdown()


@pytest.fixture
def make_engine(engine: AsyncLLM, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AsyncLLM]:
    """Stand in for ``AsyncLLM``: check a page's arguments as at a real start, then give the one that runs."""

    def make(model_name: str | None = None, *, max_sessions: int | None = None, **arguments: Any) -> AsyncLLM:
        assert arguments.pop("model", model_name) in {str(model), "..."}
        for name, value in {**arguments, "max_sessions": max_sessions or SHARED["max_sessions"]}.items():
            if name == "max_model_len":
                assert value <= SHARED[name]
            else:
                assert value == (SHARED | UNSEEN).get(name), f"{name}: the shared engine has another value"
        checked_config({**arguments, "model": str(model)}, max_sessions=max_sessions)
        return engine

    monkeypatch.setattr(adapter, "AsyncLLM", make)
    monkeypatch.setattr(engine, "shutdown", lambda: None)
    return make


@pytest.fixture
def make_llm(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """Start a page's ``LLM``, on the tiny model; one lives at a time."""
    started: list[LLM] = []

    def stop() -> None:
        while started:
            started.pop().llm_engine.engine_core.shutdown()

    def make(**arguments: Any) -> LLM:
        assert arguments.pop("model") in {str(model), "..."}
        # What cannot be is refused here, and leaves the page's running engine alone.
        given = {name: value for name, value in arguments.items() if name != "kv_cache_policy"}
        policy_arguments({"model": str(model), **UNSEEN, **given}, arguments["kv_cache_policy"])
        stop()
        started.append(LLM(model=str(model), **UNSEEN, **arguments))
        return started[-1]

    monkeypatch.setattr(adapter, "LLM", make)
    yield make
    stop()


@pytest.mark.usefixtures("make_engine", "make_llm")
@pytest.mark.parametrize("page", python_pages(engine=True), ids=lambda page: str(page.relative_to(ROOT)))
def test_python_runs(
    page: Path, engine: AsyncLLM, model: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "run", runner.run)
    monkeypatch.setattr(sys, "argv", ["first_session.py", str(model)])
    namespace: dict[str, Any] = {"MODEL": str(model), "__name__": "__main__"}
    for block in python_blocks(page):
        run(block, namespace, runner)
    assert not engine.output_processor.request_states, "the page leaves a session open"


def run(block: Block, namespace: dict[str, Any], runner: asyncio.Runner) -> None:
    """Run one block, ``await`` outside functions included."""
    if block.is_doctest:
        block.run_doctest(namespace)
        return
    result = eval(block.compiled(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)  # noqa: S307 - our own text
    if inspect.iscoroutine(result):
        runner.run(result)

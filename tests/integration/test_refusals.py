"""How the reasons of an engine's processes come together, without an engine."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

import pytest

from kvpolicy.adapters.vllm.shared.refusals import notes_path, reasons_of_processes, refuse
from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from pathlib import Path


def fail(*reasons: str, depth: int = 2) -> None:
    """Refuse in a process of a process, as a worker does; what is raised here does not say why."""
    if depth == 0:
        refuse(reasons)
    process = multiprocessing.get_context("spawn").Process(target=fail, args=reasons, kwargs={"depth": depth - 1})
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError("See root cause above")


def fail_twice() -> None:
    with pytest.raises(RuntimeError):
        fail("one", "two\nlines")
    fail("one", "three")


def test_the_reasons_of_all_processes_arrive_once_each() -> None:
    with pytest.raises(PolicyUsageError) as caught, reasons_of_processes():
        fail_twice()
    assert caught.value.reasons == ("one", "two\nlines", "three")
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not notes_path().exists()


def test_the_offline_facade_raises_what_its_processes_say(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the stock class, which would load vLLM in each process: one that fails as it does."""
    # Not above: the processes import this module.
    from kvpolicy.adapters.vllm import LLM

    monkeypatch.setattr("vllm.LLM.__init__", lambda *_, **__: fail("of a worker"))
    with pytest.raises(PolicyUsageError) as caught:
        LLM(str(tiny_model), kv_cache_policy="off", max_model_len=512)
    assert caught.value.reasons == ("of a worker",)


def test_a_failure_without_reasons_stays_what_it_is() -> None:
    with pytest.raises(PolicyUsageError), reasons_of_processes():
        refuse(["of an engine before"])
    with pytest.raises(RuntimeError, match="too little memory"), reasons_of_processes():
        raise RuntimeError("too little memory")
    assert not notes_path().exists()


def test_where_nobody_waits_nothing_is_left_behind() -> None:
    with pytest.raises(PolicyUsageError, match="alone"):
        refuse(["alone"])
    assert not notes_path().exists()


def test_others_cannot_read_or_guess_the_file() -> None:
    with reasons_of_processes():
        assert notes_path().stat().st_mode & 0o777 == 0o600
    assert multiprocessing.current_process().authkey.hex() not in str(notes_path())

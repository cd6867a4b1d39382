"""The parent's side of a run, with a child that is a few lines of Python instead of an engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from attrs import asdict

from kvpolicy.bench.processes.parent import child_environment
from kvpolicy.bench.streams import run as streams
from kvpolicy.bench.streams.records import ChunkRow, EngineKind, Outcome, Run, StreamSettings

from .runs import row

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Recorder:
    """Keeps what a listener is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.rows: list[ChunkRow] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def row(self, row: ChunkRow) -> None:
        self.rows.append(row)


def message(kind: str, **fields: Any) -> str:
    return f"print({json.dumps({'message': kind, **fields})!r}, flush=True)"


def run_child(folder: Path, *lines: str) -> tuple[Run, Recorder]:
    """Run a child that consists of these lines of Python."""
    script = folder / "child.py"
    script.write_text("import sys, time, os, signal\nsys.stdin.read()\n" + "\n".join(lines), encoding="utf-8")
    recorder = Recorder()
    settings = StreamSettings(model=str(folder), num_chunks=3)
    run = streams.run_stream(
        EngineKind.STOCK, settings, "text", log=folder / "log", listener=recorder, command=(str(script),)
    )
    return run, recorder


STARTED = message("started", facts={"vllm": "0"})
ROW = message("row", row=asdict(row(1)))


def test_rows_and_stages_are_heard_as_they_come(tmp_path: Path) -> None:
    run, recorder = run_child(
        tmp_path, message("stage", text="loading"), STARTED, ROW, message("end", outcome="finished")
    )

    assert run.end.outcome is Outcome.FINISHED
    assert recorder.stages == ["loading"]
    assert list(run.rows) == recorder.rows == [row(1)]
    assert run.facts == {"vllm": "0"}


def test_the_reason_of_a_death_comes_from_the_log(tmp_path: Path) -> None:
    run, _ = run_child(
        tmp_path,
        STARTED,
        ROW,
        "print('ERROR core.py:1] ValueError: no room', file=sys.stderr)",
        message("end", outcome="died", error="EngineDeadError"),
    )

    assert (run.end.outcome, run.end.error, run.end.reason) == (
        Outcome.DIED,
        "EngineDeadError",
        "ValueError: no room",
    )


def test_a_child_that_is_killed_is_a_death(tmp_path: Path) -> None:
    run, recorder = run_child(tmp_path, STARTED, ROW, "os.kill(os.getpid(), signal.SIGKILL)")

    assert run.end.outcome is Outcome.DIED
    assert run.end.error == "process ended with status -9"
    assert len(recorder.rows) == 1


def test_a_silent_child_times_out_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CHUNK_LIMIT_S", 0.5)

    run, _ = run_child(tmp_path, STARTED, ROW, "time.sleep(600)")

    assert run.end.outcome is Outcome.TIMED_OUT
    assert run.wall_s < 60


def test_a_child_does_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    """A parent starts a child that waits for its job for ever, says its id, and is killed."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'kvpolicy.bench.streams.child', str(os.getpid())],\n"
        "    stdin=sys.stdin, start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        encoding="utf-8",
    )
    waiting, never_written = os.pipe()
    command = [sys.executable, str(script)]
    with os.fdopen(waiting) as stdin, os.fdopen(never_written, "w"):
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=False, timeout=60)  # noqa: S603

    # That it returned is the proof: the child held the output pipe, too.
    assert done.returncode == -signal.SIGKILL
    assert int(done.stdout) > 0


def test_what_a_user_set_stays(tmp_path: Path) -> None:
    environment = child_environment({"VLLM_LOGGING_LEVEL": "DEBUG", "HOME": "/h"}, str(tmp_path))

    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["HOME"] == "/h"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_vllm_is_quiet_unless_asked(tmp_path: Path) -> None:
    assert child_environment({}, str(tmp_path))["VLLM_LOGGING_LEVEL"] == "ERROR"

"""Starts a streaming run in a child process and listens to it: what the demo and the benchmarks share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, Protocol

from attrs import asdict, define, field

from kvpolicy.cli.child_lines import ChildLines
from kvpolicy.cli.models import offline_environment
from kvpolicy.cli.rows import ChunkRow, EngineKind, Outcome, Run, RunEnd, StreamSettings
from kvpolicy.cli.summary import find_reason
from kvpolicy.core.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

CHILD = ("-m", "kvpolicy.cli.stream_child")

# How long nothing may be heard. A start may load gigabytes; a chunk is half a second on two cores.
START_LIMIT_S = 600.0
CHUNK_LIMIT_S = 90.0
# How long a child may take to put its engine away after its last message.
_GOODBYE_S = 10.0


class Listener(Protocol):
    """Is told how a run goes while it goes."""

    def stage(self, text: str) -> None:
        """Something long begins."""

    def row(self, row: ChunkRow) -> None:
        """A chunk was answered."""


def require_engine() -> None:
    """Raise unless vLLM is installed; nothing is imported.

    Raises:
        MissingExtraError: it is not.
    """
    if find_spec("vllm") is None:
        raise MissingExtraError(extra="vllm", module="vllm")


def child_environment(environ: Mapping[str, str], model: str) -> dict[str, str]:
    """Return the environment of a run: what the user set stays, quiet and local defaults are added.

    The V1 model runner is asked for, for both engines alike: sessions need it, and past its limit the other
    one writes over memory instead of dying.
    """
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # On few cores, binding would leave the engine all but one of them.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
        # How long a thread spins before it sleeps. Measured on two cores, seconds a chunk: 0.56 by default, 0.65 with
        # this, 1.13 without any spinning; but by default a core that something else needs makes it 2 to 6.
        "GOMP_SPINCOUNT": "10000",
    }
    return {**defaults, **offline_environment(environ, model), **environ}


def run_stream(  # noqa: PLR0913 - the last one is for tests
    kind: EngineKind,
    settings: StreamSettings,
    text: str,
    *,
    log: Path,
    listener: Listener,
    command: Sequence[str] = CHILD,
) -> Run:
    """Run one stream to its end, whatever that is, and return what happened.

    Args:
        kind: Whose engine.
        settings: The stream.
        text: What is cut into chunks.
        log: File for everything that the engine's processes print.
        listener: Told of stages and rows as they come.
        command: Arguments of the Python that is the child; tests put a script in its place.
    """
    started_s = time.monotonic()
    record = _Record(listener)
    job = {"kind": kind.value, "settings": asdict(settings), "text": text}
    environment = child_environment(os.environ, settings.model)
    with log.open("w", encoding="utf-8") as log_file, _child(command, job, environment, log_file) as child:
        for message in _messages(child, record):
            record.take(message)
        end = record.end or _end_of_silent(child)
    if end.outcome is not Outcome.FINISHED:
        end = end.with_reason(find_reason(log.read_text(encoding="utf-8", errors="replace")))
    return Run(
        kind=kind,
        settings=settings,
        rows=tuple(record.rows),
        end=end,
        start_s=record.ready_s - started_s if record.ready_s else 0.0,
        wall_s=time.monotonic() - started_s,
        facts=record.facts,
    )


@define
class _Record:
    """What a child has said so far."""

    listener: Listener
    rows: list[ChunkRow] = field(factory=list)
    facts: dict[str, Any] = field(factory=dict)
    ready_s: float | None = None
    end: RunEnd | None = None

    @property
    def patience_s(self) -> float:
        return START_LIMIT_S if self.ready_s is None else CHUNK_LIMIT_S

    def take(self, message: Mapping[str, Any]) -> None:
        kind = message["message"]
        if kind == "stage":
            self.listener.stage(message["text"])
        elif kind == "started":
            self.ready_s, self.facts = time.monotonic(), message["facts"]
        elif kind == "row":
            row = ChunkRow(**message["row"])
            self.rows.append(row)
            self.listener.row(row)
        else:
            self.end = RunEnd(outcome=Outcome(message["outcome"]), error=message.get("error", ""))


@contextmanager
def _child(
    command: Sequence[str], job: Mapping[str, Any], environment: Mapping[str, str], log_file: IO[str]
) -> Iterator[ChildLines]:
    """Start a child with its job; at the end nothing of it is left, its engine processes included."""
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, *command, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log_file,
        text=True,
        env=environment,
        # A group of its own: it can be ended as a whole.
        start_new_session=True,
    )
    child = ChildLines(process)
    try:
        _hand_over(process, job)
        yield child
        process.wait(_GOODBYE_S)
    except subprocess.TimeoutExpired:
        # It hangs while it puts its engine away, which is no part of the run.
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        child.join(_GOODBYE_S)


def _hand_over(process: subprocess.Popen[str], job: Mapping[str, Any]) -> None:
    assert process.stdin is not None  # noqa: S101 - a pipe was asked for
    # A child that is dead already has its say through its exit status.
    with suppress(BrokenPipeError), process.stdin as stdin:
        json.dump(job, stdin)


def _messages(child: ChildLines, record: _Record) -> Iterator[dict[str, Any]]:
    """Yield messages until the end, the child's death, or too long a silence (which ends the record)."""
    heard_s = time.monotonic()
    while record.end is None:
        try:
            line = child.next()
        except EOFError:
            return
        if line is None:
            if time.monotonic() - heard_s > record.patience_s:
                error = f"nothing heard for {record.patience_s:.0f} s"
                record.end = RunEnd(outcome=Outcome.TIMED_OUT, error=error)
                child.process.kill()
            continue
        heard_s = time.monotonic()
        yield json.loads(line)


def _end_of_silent(child: ChildLines) -> RunEnd:
    """Return the end of a child that ended without a word."""
    return RunEnd(outcome=Outcome.DIED, error=f"process ended with status {child.process.returncode}")

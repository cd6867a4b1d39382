"""The parent's side of the benchmark's engines: child processes that stay alive and take turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from attrs import asdict, define, field

from kvpolicy.cli.bench.steps import RunRow
from kvpolicy.cli.child_lines import ChildLines
from kvpolicy.cli.streams import child_environment
from kvpolicy.cli.summary import find_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvpolicy.cli.bench.cases import Workload

CHILD = ("-m", "kvpolicy.cli.bench.child")

# How long nothing may be heard. Compiling may take minutes; in a run there is a word every second.
START_LIMIT_S = 900.0
RUN_LIMIT_S = 120.0
_GOODBYE_S = 10.0


class EngineLostError(Exception):
    """An engine died, failed or fell silent; the message says which, and why. It is not used again."""


@define(kw_only=True)
class LiveEngine:
    """An engine in a child process, waiting for work. ``facts`` are what it says of itself."""

    process: subprocess.Popen[str]
    log: Path
    facts: Mapping[str, Any] = field(factory=dict)
    _lines: ChildLines = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Begin to listen."""
        self._lines = ChildLines(self.process)

    def run(self, workload: Workload, progress: Callable[[int], None]) -> RunRow:
        """Run a workload.

        Args:
            workload: What to generate.
            progress: Told from time to time how many tokens have been made.

        Raises:
            EngineLostError: There is no row.
        """
        self.send(asdict(workload))
        while True:
            message = self.receive(RUN_LIMIT_S)
            if message["message"] == "row":
                return RunRow(**message["row"])
            progress(message["num_tokens"])

    def send(self, value: Mapping[str, Any]) -> None:
        """Send one line; that nobody is there to read it is found out when its answer is waited for."""
        assert self.process.stdin is not None  # noqa: S101 - a pipe was asked for
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def receive(self, patience_s: float) -> dict[str, Any]:
        """Return the next message.

        Raises:
            EngineLostError: There is none, or it says that the engine failed.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                line = self._lines.next()
            except EOFError:
                raise self._lost(f"process ended with status {self.process.returncode}") from None
            if line is None:
                if time.monotonic() > deadline_s:
                    raise self._lost(f"nothing heard for {patience_s:.0f} s")
                continue
            message: dict[str, Any] = json.loads(line)
            if message["message"] == "failed":
                raise self._lost(message["error"])
            return message

    def end(self) -> None:
        """End it; nothing of it is left."""
        _end(self.process)
        self._lines.join(_GOODBYE_S)

    def _lost(self, what: str) -> EngineLostError:
        reason = find_reason(self.log.read_text(encoding="utf-8", errors="replace"))
        why = f" ({reason})" if reason and reason not in what else ""
        return EngineLostError(f"{what}{why}; log: {self.log}")


@contextmanager
def live_engine(job: Mapping[str, Any], *, log: Path, command: Sequence[str] = CHILD) -> Iterator[LiveEngine]:
    """Start an engine and wait until it can work; at the end nothing of it is left.

    Args:
        job: Engine arguments, policy and extra arguments of every request.
        log: File for everything that the engine prints.
        command: Arguments of the Python that is the child; tests put a script in its place.

    Raises:
        EngineLostError: It did not start.
    """
    environment = child_environment(os.environ, str(job["arguments"]["model"]))
    with log.open("w", encoding="utf-8") as log_file:
        engine = LiveEngine(process=_spawn(command, environment, log_file), log=log)
        try:
            engine.send(job)
            engine.facts = engine.receive(START_LIMIT_S)["facts"]
            yield engine
        finally:
            engine.end()


def _spawn(command: Sequence[str], environment: Mapping[str, str], log_file: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, *command, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log_file,
        text=True,
        env=environment,
        # A group of its own: it can be ended as a whole.
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    """Let a child put its engine away, which it does when its input ends; then end what is left of its group."""
    assert process.stdin is not None  # noqa: S101 - a pipe was asked for
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GOODBYE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

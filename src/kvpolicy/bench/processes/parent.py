"""A parent's side of a child process with an engine in it: started, spoken to, listened to and ended here alone.

Both sides speak in JSON lines. Everything else that a child prints goes to its log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attrs import define, field

from kvpolicy.bench.models.smollm import offline_environment
from kvpolicy.bench.processes.lines import ChildLines
from kvpolicy.core.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

# How long a child may take to put its engine away once nothing more is asked of it.
_GOODBYE_S = 10.0


class ChildLostError(Exception):
    """Nothing more will be heard of a child; the message says why."""


class ChildEndedError(ChildLostError):
    """The process has ended."""


class ChildSilentError(ChildLostError):
    """The process is there and has said nothing for too long."""


@define
class Child:
    """A running child, in a process group of its own. ``started_child`` makes one."""

    process: subprocess.Popen[str]
    _lines: ChildLines = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Begin to listen."""
        self._lines = ChildLines(self.process)

    def send(self, value: Mapping[str, Any]) -> None:
        """Send one line; that nobody is there to read it is found out when its answer is waited for."""
        assert self.process.stdin is not None  # noqa: S101 - a pipe was asked for
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def end_input(self) -> None:
        """Tell it that nothing more will be sent."""
        assert self.process.stdin is not None  # noqa: S101 - a pipe was asked for
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def receive(self, patience_s: float) -> dict[str, Any]:
        """Return the next message.

        Raises:
            ChildEndedError: there is none, and none will come.
            ChildSilentError: there was none for ``patience_s``.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                line = self._lines.next()
            except EOFError:
                raise ChildEndedError(f"process ended with status {self.process.returncode}") from None
            if line is not None:
                message: dict[str, Any] = json.loads(line)
                return message
            if time.monotonic() > deadline_s:
                raise ChildSilentError(f"nothing heard for {patience_s:.0f} s")

    def wait(self) -> None:
        """Let it put its engine away. One that hangs while it does so is not waited for: that is no part of a run."""
        self.end_input()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GOODBYE_S)

    def kill(self) -> None:
        """End what is left of it, its engine's processes included."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.end_input()
        self._lines.join(_GOODBYE_S)


@contextmanager
def started_child(command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> Iterator[Child]:
    """Start a child; at the end nothing of it is left. Where an error ends the block, it is not waited for.

    Args:
        command: Arguments of the Python that is the child; this process's id is added.
        environment: All of its environment; see ``child_environment``.
        log: File for everything that the child and its engine print.
    """
    with log.open("w", encoding="utf-8") as log_file:
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
        child = Child(process)
        try:
            yield child
            child.wait()
        finally:
            child.kill()


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

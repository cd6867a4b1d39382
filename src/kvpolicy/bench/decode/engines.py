"""The parent's side of the benchmark's engines: child processes that stay alive and take turns."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, field

from kvpolicy.bench.decode.steps import RunRow
from kvpolicy.bench.processes.engine_log import find_reason
from kvpolicy.bench.processes.parent import Child, ChildLostError, child_environment, started_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvpolicy.bench.decode.cases import Workload

CHILD = ("-m", "kvpolicy.bench.decode.child")

# How long nothing may be heard. Compiling may take minutes; in a run there is a word every second.
START_LIMIT_S = 900.0
RUN_LIMIT_S = 120.0


class EngineLostError(Exception):
    """An engine died, failed or fell silent; the message says which, and why. It is not used again."""


@define(kw_only=True)
class LiveEngine:
    """An engine in a child process, waiting for work. ``facts`` are what it says of itself."""

    child: Child
    log: Path
    facts: Mapping[str, Any] = field(factory=dict)

    def run(self, workload: Workload, progress: Callable[[int], None]) -> RunRow:
        """Run a workload.

        Args:
            workload: What to generate.
            progress: Told from time to time how many tokens have been made.

        Raises:
            EngineLostError: There is no row.
        """
        self.child.send(asdict(workload))
        while True:
            message = self.receive(RUN_LIMIT_S)
            if message["message"] == "row":
                return RunRow(**message["row"])
            progress(message["num_tokens"])

    def receive(self, patience_s: float) -> dict[str, Any]:
        """Return the next message.

        Raises:
            EngineLostError: There is none, or it says that the engine failed.
        """
        try:
            message = self.child.receive(patience_s)
        except ChildLostError as error:
            raise self._lost(str(error)) from None
        if message["message"] == "failed":
            raise self._lost(message["error"])
        return message

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
    with started_child(command, environment=environment, log=log) as child:
        child.send(job)
        engine = LiveEngine(child=child, log=log)
        engine.facts = engine.receive(START_LIMIT_S)["facts"]
        yield engine

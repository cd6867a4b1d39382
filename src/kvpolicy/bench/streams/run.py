"""Runs one stream in a child process and listens to it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Protocol

from attrs import asdict, define, field

from kvpolicy.bench.processes.engine_log import find_reason
from kvpolicy.bench.processes.parent import (
    Child,
    ChildEndedError,
    ChildSilentError,
    child_environment,
    started_child,
)
from kvpolicy.bench.streams.records import ChunkRow, EngineKind, Outcome, Run, RunEnd, StreamSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CHILD = ("-m", "kvpolicy.bench.streams.child")

# How long nothing may be heard. A start may load gigabytes; a chunk is half a second on two cores.
START_LIMIT_S = 600.0
CHUNK_LIMIT_S = 90.0


class Listener(Protocol):
    """Is told how a run goes while it goes."""

    def stage(self, text: str) -> None:
        """Something long begins."""

    def row(self, row: ChunkRow) -> None:
        """A chunk was answered."""


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
    with started_child(command, environment=environment, log=log) as child:
        child.send(job)
        child.end_input()
        end = _listen(child, record)
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


def _listen(child: Child, record: _Record) -> RunEnd:
    """Take messages until the end, the child's death, or too long a silence; return how the run ended."""
    while record.end is None:
        try:
            record.take(child.receive(record.patience_s))
        except ChildEndedError as error:
            return RunEnd(outcome=Outcome.DIED, error=str(error))
        except ChildSilentError as error:
            # It is not asked to put its engine away: it would not hear that either.
            child.process.kill()
            return RunEnd(outcome=Outcome.TIMED_OUT, error=str(error))
    return record.end

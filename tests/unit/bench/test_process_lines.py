"""Lines of a child that has ended: all of them are heard, however late the thread that reads them is."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

import pytest

from kvpolicy.bench.processes.lines import ChildLines

if TYPE_CHECKING:
    from collections.abc import Iterator


class SlowPipe:
    """A pipe whose reader gets no processor for a while."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()

    def __iter__(self) -> Iterator[str]:
        time.sleep(0.6)
        yield from self.pipe


def child(code: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **more)  # noqa: S603 - ours


def next_line(lines: ChildLines) -> str:
    while (line := lines.next()) is None:
        pass
    return line


def test_the_last_lines_of_a_child_that_has_ended_are_heard() -> None:
    process = child("print('one'); print('two')")
    process.wait()
    process.stdout = SlowPipe(process.stdout)  # type: ignore[assignment]
    lines = ChildLines(process)
    assert [next_line(lines), next_line(lines)] == ["one\n", "two\n"]
    with pytest.raises(EOFError):
        next_line(lines)


def test_who_holds_the_pipe_of_a_child_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    holds = "subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=sys.stdin)"
    process = child(f"import subprocess, sys; p = {holds}; print('one')", stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin:
        lines = ChildLines(process)
        assert next_line(lines) == "one\n"
        monkeypatch.setattr("kvpolicy.bench.processes.lines._LAST_WORDS_S", 0.1)
        with pytest.raises(EOFError):
            next_line(lines)
        assert process.poll() is not None
    lines.join(60)

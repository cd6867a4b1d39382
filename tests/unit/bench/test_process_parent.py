"""A child's life, as its parent leads it: an orderly end where all went well, a quick one where it did not."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from kvpolicy.bench.processes import parent
from kvpolicy.bench.processes.parent import Child, ChildEndedError, ChildSilentError, started_child

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

# Answers each line with itself; when there are no more it puts things away, of which it leaves a file.
ECHO = """
import pathlib, sys, time
for line in sys.stdin:
    print(line, end="", flush=True)
time.sleep(0.3)
pathlib.Path(sys.argv[1]).touch()
"""


def child(folder: Path, code: str = ECHO) -> AbstractContextManager[Child]:
    command = ("-c", code, str(folder / "put-away"))
    return started_child(command, environment=dict(os.environ), log=folder / "log")


def test_a_child_is_spoken_to_and_may_put_its_engine_away(tmp_path: Path) -> None:
    with child(tmp_path) as echo:
        for number in range(3):
            echo.send({"number": number})
            assert echo.receive(30.0) == {"number": number}
        assert not (tmp_path / "put-away").exists()
    assert echo.process.returncode == 0
    assert (tmp_path / "put-away").exists()


def test_a_child_is_not_waited_for_where_an_error_ends_the_block(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt), child(tmp_path, "import time; time.sleep(60)") as sleeper:
        raise KeyboardInterrupt
    assert sleeper.process.returncode == -9
    assert time.monotonic() - started_s < parent._GOODBYE_S


def test_a_silent_child_and_one_that_has_ended_are_told_apart(tmp_path: Path) -> None:
    with child(tmp_path) as echo:
        with pytest.raises(ChildSilentError, match="nothing heard for 0 s"):
            echo.receive(0.0)
        echo.end_input()
        with pytest.raises(ChildEndedError, match="process ended with status 0"):
            echo.receive(30.0)


def test_a_line_to_a_child_that_is_gone_is_lost_in_silence(tmp_path: Path) -> None:
    with child(tmp_path, "raise SystemExit(3)") as gone:
        gone.process.wait()
        gone.send({"number": 1})
        with pytest.raises(ChildEndedError, match="status 3"):
            gone.receive(30.0)

"""What ``kvpolicy doctor`` prints, and its exit status."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvpolicy.adapters.vllm.shared.diagnosis import Diagnosis, Fact, Verdict
from kvpolicy.cli.app import app
from kvpolicy.cli.doctor import show


def shown(diagnosis: Diagnosis) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(diagnosis, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def diagnosis(sessions: tuple[str, ...], *, asked: bool = True) -> Diagnosis:
    return Diagnosis(
        facts=(Fact("model", "tiny [2 layers]"), Fact("model runner", "V2", is_good=False)),
        verdicts=(
            Verdict(name="A", is_asked_for=asked, reasons=sessions),
            Verdict(name="B", is_asked_for=True, reasons=()),
        ),
    )


def test_facts_and_every_reason_are_shown() -> None:
    text = shown(diagnosis(("--max-num-seqs 1: sessions need at least 2", "--model [x]: no")))
    for part in ("tiny [2 layers]", "V2", "- --max-num-seqs 1: sessions need at least 2", "- --model [x]: no"):
        assert part in text
    assert [line.split("│")[2].strip() for line in text.splitlines() if line.startswith(("│ A", "│ B"))] == [
        "no",
        "yes",
    ]


@pytest.mark.parametrize(
    ("reasons", "asked", "is_good"), [((), True, True), (("x",), True, False), (("x",), False, True)]
)
def test_it_is_good_if_what_was_asked_for_works(reasons: tuple[str, ...], *, asked: bool, is_good: bool) -> None:
    assert diagnosis(reasons, asked=asked).is_good is is_good


def test_help_needs_no_engine() -> None:
    result = CliRunner().invoke(app, ["doctor", "--help"])
    assert result.exit_code == 0
    assert "Exit status" in result.output

"""The command line itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvpolicy.cli.app import app


def test_help_of_the_demo_explains_every_option() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})

    assert result.exit_code == 0
    for option in ("model", "text", "chunks", "chunk-tokens", "reply-tokens", "budget", "context", "block-size"):
        assert f"--{option} " in result.output
    assert "Unset: SmolLM2" in result.output
    for option in ("temperature", "dtype", "kv-cache-mib", "output", "json", "quick", "skip-stock"):
        assert f"--{option} " in result.output


def test_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys, kvpolicy.cli.app;"
        "print([n for n in ('vllm', 'torch', 'transformers', 'matplotlib', 'numpy') if n in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - our own text

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["app", "serve", "doctor", "plan"])
def test_what_serves_loads_nothing_of_the_benchmarks(module: str) -> None:
    code = f"import sys, kvpolicy.cli.{module}; print([n for n in sys.modules if n.startswith('kvpolicy.bench')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 - ours

    assert done.stdout.strip() == "[]"

"""``kvpolicy bench`` as it is run: engines in processes of their own that take turns, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("stock", "limit", "randkv-head")


def bench(*arguments: str) -> str:
    command = [sys.executable, "-c", "import kvpolicy.cli; kvpolicy.cli.main()", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)  # noqa: S603 - ours
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def report(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    path = folder / "report.json"
    arguments = ("--quick", "--pairs", "1", "--policies", "randkv-head", "--model", str(tiny_model))
    printed = bench("decode", "--case", "long-3000", *arguments, "--output", str(folder / "logs"), "--json", str(path))
    assert all(kind in printed for kind in KINDS)
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def test_every_engine_delivers_every_token(report: dict[str, Any]) -> None:
    [case] = report["cases"]
    rows = {row["kind"]: row for row in case["rows"]}

    assert tuple(rows) == KINDS
    assert case["failures"] == []
    assert rows["stock"]["num_output_tokens"] == rows["randkv-head"]["num_output_tokens"] == 8 * 600
    assert rows["limit"]["num_output_tokens"] == 3 * 8 * 32
    assert all(row["tokens_per_s"] > 0 and row["step_ms"] > 0 and row["peak_memory_bytes"] > 0 for row in rows.values())
    assert report["environment"]["versions"]["kvpolicy"]


def test_events_fire_where_they_must(report: dict[str, Any]) -> None:
    """The first one is due at 321 entries, the others after every 64; the last token is never stored."""
    [case] = report["cases"]
    stock, limit, ours = case["rows"]
    num_each = 1 + (64 + 600 - 1 - 321) // 64

    assert ours["num_events"] == 8 * num_each
    # All requests are of the same length, so that their events fall into the same steps.
    assert (ours["num_event_steps"], ours["num_decode_steps"]) == (num_each, 599)
    assert ours["num_dropped"] == 8 * (1 + 64 * (num_each - 1))
    assert 0 < ours["expand_s"] + ours["relocate_s"] < ours["wall_s"]
    assert ours["event_step_ms"] > 0
    assert stock["num_events"] == limit["num_events"] == 0


def test_blocks_and_engines_are_what_they_should_be(report: dict[str, Any]) -> None:
    [case] = report["cases"]
    stock, limit, ours = case["rows"]

    assert (stock["peak_blocks"], limit["peak_blocks"], ours["peak_blocks"]) == (8 * 21, 8 * 12, 8 * 12)
    assert [row["num_preemptions"] for row in case["rows"]] == [0, 0, 0]
    facts = case["engines"]
    assert facts["stock"].pop("scheduler") == "Scheduler"
    assert facts["randkv-head"].pop("scheduler") == "CompactionScheduler"
    assert facts["stock"] == facts["randkv-head"]
    assert case["figures"]["randkv-head"]["x stock"]["num"] == 1

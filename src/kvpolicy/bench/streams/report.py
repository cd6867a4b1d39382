"""Writes runs down for machines: one JSON file with the settings, the hardware and every row."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from attrs import asdict

from kvpolicy.bench.streams.figures import summarise
from kvpolicy.bench.streams.records import run_to_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvpolicy.bench.streams.records import Run


def write_report(path: Path, runs: Sequence[Run], facts: Mapping[str, Any]) -> None:
    """Write the runs with their summaries; the folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [{**run_to_json(run), "summary": asdict(summarise(run))} for run in runs]
    path.write_text(json.dumps({"environment": dict(facts), "runs": entries}, indent=1) + "\n", encoding="utf-8")

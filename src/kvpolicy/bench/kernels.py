"""``kvpolicy bench kernels``: what an event costs by itself, without an engine.

``python -m kvpolicy.bench.kernels`` measures and writes one JSON array: importing vLLM for the layout of its KV
caches prints, and starts threads.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen
from rich.table import Table

from kvpolicy.bench.decode.tables import number
from kvpolicy.bench.machine import environment_facts
from kvpolicy.bench.processes.child import take_over_stdout
from kvpolicy.bench.processes.parent import child_environment, require_engine
from kvpolicy.core.compaction import CompactionEvent, expand
from kvpolicy.core.draws import UniformDraw
from kvpolicy.core.errors import EngineContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from kvpolicy.kernels.expand.spec import HeadGrid

_BLOCK_SIZE, _HEAD_SIZE, _NUM_LAYERS, _NUM_KV_HEADS = 32, 64, 8, 8
_BUFFER_SIZE, _PROMPT_LENGTH = 64, 64
_EVENT_BUDGET, _PLANNER_BUDGET = 256, 2048
_MANY_LAYERS = 36
# So many requests take turns: no event finds in the processor's caches what the last one moved.
_NUM_REQUESTS = 16
_EVENT_MS, _PLANNER_MS, _EXPAND_MS = 1.5, 8.0, 8.0
_LEAST_RUNS, _LEAST_S, _WARM_UP_RUNS = 50, 2.0, 5


@frozen(kw_only=True)
class KernelTime:
    """Times of one thing; ``target_ms`` is what the median is to reach, None: there is no target."""

    name: str
    executor: str
    best_ms: float
    median_ms: float
    num_runs: int
    target_ms: float | None = None


def run_kernels(console: Console, path: Path | None) -> int:
    """Measure, print and write; return the exit status.

    Raises:
        EngineContractError: The measuring process failed.
    """
    require_engine()
    command = [sys.executable, "-m", "kvpolicy.bench.kernels"]
    environment = child_environment(os.environ, ".")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    if done.returncode != 0:
        raise EngineContractError(f"the kernels could not be measured: {done.stderr.strip()[-2000:]}")
    times = [KernelTime(**entry) for entry in json.loads(done.stdout)["times"]]
    facts = environment_facts(datetime.now(UTC))
    console.print(f"{facts['processor']}, {facts['num_cores']} cores; {facts['versions']}", highlight=False)
    console.print(kernel_table(times))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {"environment": facts, "kernels": [asdict(entry) for entry in times]}
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def kernel_table(times: Sequence[KernelTime]) -> Table:
    """Return the table of the kernel times."""
    table = Table()
    table.add_column("what")
    table.add_column("executor")
    for name in ("best ms", "median ms", "to reach", ""):
        table.add_column(name, justify="right")
    for entry in times:
        target = "-" if entry.target_ms is None else f"<= {entry.target_ms:g}"
        judged = "" if entry.target_ms is None else ("reached" if entry.median_ms <= entry.target_ms else "MISSED")
        cells = (number(entry.best_ms, 3), number(entry.median_ms, 3), target, judged)
        table.add_row(entry.name, entry.executor, *cells)
    return table


def event_at(budget: int, ordinal: int = 0) -> CompactionEvent:
    """Return an event in steady state: K + 2r entries are held, r of them go, and the newest r stay."""
    return CompactionEvent(
        key=(ordinal + 1, 2),
        ordinal=ordinal,
        prompt_length=_PROMPT_LENGTH,
        physical_length=budget + 2 * _BUFFER_SIZE,
        num_dropped=_BUFFER_SIZE,
        num_protected=_BUFFER_SIZE,
        draw=UniformDraw(),
    )


def measure(
    run: Callable[[int], Any], *, least_runs: int = _LEAST_RUNS, least_s: float = _LEAST_S
) -> tuple[float, float, int]:
    """Return best and median time in ms, and of how many runs; ``run`` is given the number of the run."""
    for i in range(_WARM_UP_RUNS):
        run(i)
    times: list[float] = []
    begun_s = time.perf_counter()
    while len(times) < least_runs or time.perf_counter() - begun_s < least_s:
        started_s = time.perf_counter()
        run(len(times))
        times.append(time.perf_counter() - started_s)
    return 1000 * min(times), 1000 * median(times), len(times)


def _measure_all() -> list[KernelTime]:
    times = _events()
    planner_event = event_at(_PLANNER_BUDGET)
    what = f"K = {_PLANNER_BUDGET}, r = {_BUFFER_SIZE}"
    best, mid, runs = measure(lambda number: expand(planner_event, 0, number % _NUM_KV_HEADS))
    times.append(
        KernelTime(
            name=f"planner, one head, {what}",
            executor="Python",
            best_ms=best,
            median_ms=mid,
            num_runs=runs,
            target_ms=_PLANNER_MS,
        )
    )
    return times + _expands(planner_event, f"expand, {_MANY_LAYERS} x {_NUM_KV_HEADS} heads, {what}")


def _events() -> list[KernelTime]:
    """Time whole events, as a worker carries them out, and their halves."""
    import torch

    from kvpolicy.adapters.vllm import adapter_package
    from kvpolicy.adapters.vllm.shared.compactor import Compactor
    from kvpolicy.adapters.vllm.shared.messages import Compaction
    from kvpolicy.kernels.expand.spec import HeadGrid

    probe = importlib.import_module(f"{adapter_package()}.worker.layout_probe").probe_cpu_layout
    blocks = -(-(_EVENT_BUDGET + 2 * _BUFFER_SIZE) // _BLOCK_SIZE)
    shape = (_NUM_REQUESTS * blocks, _NUM_KV_HEADS, _BLOCK_SIZE, 2 * _HEAD_SIZE)
    is_compiled = find_spec("numba") is not None
    compactor = Compactor(
        caches=tuple(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(_NUM_LAYERS)),
        layout=probe(dtype=torch.bfloat16, block_size=_BLOCK_SIZE, head_size=_HEAD_SIZE),
        grid=HeadGrid(num_layers=_NUM_LAYERS, num_kv_heads=_NUM_KV_HEADS),
        block_size=_BLOCK_SIZE,
        is_compiled=is_compiled,
    )
    compactor.warm_up()
    tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(_NUM_REQUESTS)]
    events = [Compaction(request_id=str(i), event=event_at(_EVENT_BUDGET, ordinal=i)) for i in range(_NUM_REQUESTS)]
    works = []

    def run(number: int) -> None:
        turn = number % _NUM_REQUESTS
        compactor.apply([events[turn]], [tables[turn]])
        works.append(compactor.take_work())

    best, mid, runs = measure(run)
    name = f"event, {_NUM_LAYERS} layers x {_NUM_KV_HEADS} heads x {_BUFFER_SIZE} moves of {_HEAD_SIZE}"
    executor = _executor(is_compiled=is_compiled)
    halves = [
        KernelTime(
            name=f"  {half}",
            executor=executor,
            best_ms=1000 * min(values),
            median_ms=1000 * median(values),
            num_runs=runs,
        )
        for half in ("expand", "relocate")
        if (values := [getattr(work, f"{half}_s") for work in works[_WARM_UP_RUNS:]])
    ]
    whole = KernelTime(name=name, executor=executor, best_ms=best, median_ms=mid, num_runs=runs, target_ms=_EVENT_MS)
    return [whole, *halves]


def _expands(event: CompactionEvent, name: str) -> list[KernelTime]:
    """Time vectorised expansion by every executor that there is."""
    from kvpolicy.kernels.expand.spec import HeadGrid

    grid = HeadGrid(num_layers=_MANY_LAYERS, num_kv_heads=_NUM_KV_HEADS)
    times: list[KernelTime] = []
    for is_compiled in (True, False):
        if is_compiled and find_spec("numba") is None:
            continue
        module = importlib.import_module(f"kvpolicy.kernels.expand.{'compiled' if is_compiled else 'torch'}")
        best, mid, runs = measure(partial(_expand_moves, module, event, grid))
        times.append(
            KernelTime(
                name=name,
                executor=_executor(is_compiled=is_compiled),
                best_ms=best,
                median_ms=mid,
                num_runs=runs,
                # The target is for what the engine uses here.
                target_ms=_EXPAND_MS if not times else None,
            )
        )
    return times


def _expand_moves(module: Any, event: CompactionEvent, grid: HeadGrid, _number: int) -> None:  # noqa: ANN401 - a module
    module.expand_moves([event], grid)


def _executor(*, is_compiled: bool) -> str:
    return "compiled" if is_compiled else "torch"


if __name__ == "__main__":
    send_times = take_over_stdout()
    send_times("kernels", times=[asdict(entry) for entry in _measure_all()])

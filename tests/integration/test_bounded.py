"""Constant memory and constant cost: many chunks on a tiny model, with everything that could grow measured."""

from __future__ import annotations

import gc
import json
import statistics
import time
import tracemalloc
from itertools import combinations
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from kvpolicy.core.spaces import blocks_for
from tests.integration.engine import SteppedEngine, SteppedSession
from tests.integration.replay import random_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WINDOW = {"total_tokens": 256, "min_total_tokens": 64}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(tiny_model)
    yield engine
    engine.close()


def container_sizes(session: SteppedSession) -> dict[str, int]:
    """Every container that holds something for this session, in the scheduler and in the worker."""
    engine, record = session.engine, session.record
    request, state = record.request, engine.runner.requests.get(session.id)
    sizes = {
        "segments": len(record.ledger.log.segments),
        "tokens": len(request._all_token_ids),
        "prompt": len(request.prompt_token_ids),
        "output": len(request._output_token_ids),
        "hashes": len(request.block_hashes),
        "queue": len(request.streaming_queue),
        "events": len(request.events),
        "features": len(request.mm_features),
        "requests": len(engine.scheduler.requests),
        "skipped": len(engine.scheduler.skipped_waiting),
        "finished": len(engine.scheduler.finished_req_ids),
        "cached": len(engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].num_cached_block),
    }
    if state is not None:
        sizes |= {
            "worker prompt": len(state.prompt_token_ids),
            "worker output": len(state.output_token_ids),
            "worker blocks": len(state.block_ids[0]),
        }
    return sizes


def fixed_work() -> None:
    """Take a part of the time of a chunk, spent as a chunk spends it: in the interpreter, and on small tensors."""
    values = torch.arange(64.0)
    for number in range(60):
        values = (values * 0.5 + number).roll(1)
        json.loads(json.dumps({"number": number, "values": list(range(20))}))


def test_a_thousand_chunks(engine: SteppedEngine) -> None:
    """The processor's time of a chunk is measured by that of fixed work done right after it.

    So neither a neighbour that takes the processor away counts, nor one that makes everything on it slower, in the
    early chunks or in the late ones.
    """
    free = engine.num_free_blocks()
    session = SteppedSession(engine, "a", retention=WINDOW, max_tokens=4)
    limit = blocks_for(256, 16) + 1
    peak: dict[str, int] = {}
    warm: dict[str, int] = {}
    costs = []
    for i, chunk in enumerate(random_chunks(1, 1000, 18, 24)):
        start_s = time.process_time()
        answer = session.push(chunk, logprobs=None)
        middle_s = time.process_time()
        fixed_work()
        costs.append((middle_s - start_s) / (time.process_time() - middle_s))
        assert answer.report is not None
        assert answer.report.num_blocks <= limit
        assert answer.report.resident_tokens <= 256
        engine.events.events.clear()
        sizes = container_sizes(session)
        peak = {name: max(size, peak.get(name, 0)) for name, size in sizes.items()}
        if i == 99:
            warm = dict(peak)
    # What the first hundred chunks reached, nine hundred more do not exceed (by more than one chunk's raggedness).
    assert all(peak[name] <= warm[name] + 24 for name in peak), (warm, peak)
    assert session.record.ledger.counts.num_evictions > 900
    early, late = statistics.median(costs[50:250]), statistics.median(costs[-200:])
    print(f"per chunk: {early:.2f} of the fixed work early, {late:.2f} late")
    assert late < 1.5 * early
    session.close()
    assert engine.num_free_blocks() == free
    assert not engine.scheduler.sessions.records


@pytest.mark.long
def test_host_memory_has_no_slope_over_five_thousand_chunks(engine: SteppedEngine) -> None:
    """Python's own memory exactly, the process's by the median of all slopes (it grows in rare, large steps).

    The first 6,000 chunks are not looked at: each new batch shape makes torch's libraries allocate once, on the stock
    engine too, and it takes that long until every shape has been seen.
    """
    session = SteppedSession(engine, "long", retention=WINDOW, max_tokens=2)
    process = psutil.Process()
    chunks = iter(random_chunks(2, 11_200, 18, 24))

    def push(num: int) -> None:
        for _ in range(num):
            session.push(next(chunks), logprobs=None)
            engine.events.events.clear()
        gc.collect()

    push(6000)
    tracemalloc.start()
    push(200)
    traced, num_objects = tracemalloc.get_traced_memory()[0], len(gc.get_objects())
    resident = []
    for _ in range(50):
        push(100)
        resident.append(process.memory_info().rss)
    per_chunk = (tracemalloc.get_traced_memory()[0] - traced) / 5000
    tracemalloc.stop()
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(resident), 2)]
    rss_per_chunk = statistics.median(slopes) / 100
    print(f"over 5,000 chunks: {per_chunk:.1f} Python bytes and {rss_per_chunk:.0f} resident bytes per chunk")
    assert abs(per_chunk) < 20
    assert rss_per_chunk < 200
    assert len(gc.get_objects()) <= num_objects + 100
    session.close()

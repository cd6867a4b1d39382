"""Parking under vLLM's priority scheduling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.core.states import SessionState
from tests.integration.engine import SteppedEngine, SteppedSession, greedy

if TYPE_CHECKING:
    from pathlib import Path

NUM_BLOCKS = 25


def test_the_head_of_a_priority_queue_gets_room(tiny_model: Path) -> None:
    """The most important waiting request needs the idle session's blocks; one that would fit waits behind it."""
    engine = SteppedEngine(
        tiny_model,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_seqs=4,
        max_model_len=256,
        max_num_batched_tokens=256,
        scheduling_policy="priority",
    )
    session = SteppedSession(engine, "idle", retention={"total_tokens": 200, "min_total_tokens": 64}, priority=5)
    session.push([7] * 150)
    engine.send("small", [5] * 10, greedy(4), resumable=False, priority=9)
    engine.send("large", [6] * 250, greedy(4), resumable=False, priority=0)
    assert len(engine.answer("large").token_ids) == 4
    assert len(engine.answer("small").token_ids) == 4
    assert session.record.state is SessionState.PARKED
    session.close()
    assert engine.num_free_blocks() == NUM_BLOCKS - 1
    engine.close()

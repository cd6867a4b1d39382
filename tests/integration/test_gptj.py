"""GPT-J: neighbouring pairs are rotated, and only some dimensions, with no word of it in ``rope_parameters``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.engine import SteppedEngine, SteppedSession
from tests.integration.generation import GenerationOracle
from tests.integration.oracle import Oracle
from tests.integration.replay import Replay, random_chunks
from tests.integration.test_randkv_oracle import POLICIES, TOLERANCE, differences, generate
from tests.models import tiny_gptj

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gptj(tmp_path_factory.mktemp("models") / "gptj", max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(model, kv_cache_policy="off")
    yield engine
    engine.close()


def test_a_session_that_evicts_and_consolidates_equals_the_oracle(engine: SteppedEngine, model: Path) -> None:
    session = SteppedSession(engine, "session", retention={"total_tokens": 160, "min_total_tokens": 64}, max_tokens=6)
    run = Replay(session, Oracle(model))
    for i, chunk in enumerate(random_chunks(7, 20, 18, 24)):
        run.push(chunk, preempt_after=3 if i == 10 else None)
    session.close()
    print(f"{run.num_steps} steps, {run.num_evictions} evictions, largest difference {run.worst:.1e}")
    assert run.num_evictions >= 5
    assert run.num_consolidations >= 1
    assert run.num_preemptions == 1
    assert run.num_greedy_misses == 0
    assert run.worst < TOLERANCE


def test_a_compacted_generation_equals_the_oracle(engine: SteppedEngine, model: Path) -> None:
    answer = generate(engine, POLICIES["head"], 300, preempt_at=200)
    block_size = engine.config.cache_config.block_size
    worst, misses, num_events = differences(GenerationOracle(model), answer, POLICIES["head"], block_size)
    print(f"{num_events} events, largest difference {max(worst):.1e}")
    assert num_events >= 10
    assert misses == 0
    assert max(worst) < TOLERANCE

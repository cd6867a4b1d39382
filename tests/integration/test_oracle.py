"""Gapped positions on the real engine against an independent float32 forward pass with the same cuts.

Every test here evicts, has prefix caching on, a neighbour request in the batch, and one forced preemption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvpolicy.adapters.vllm.shared.session_book import SessionBook, SessionRecord
from tests.integration.engine import Answer, SteppedEngine, SteppedSession, greedy
from tests.integration.oracle import Oracle
from tests.integration.replay import Replay, random_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOLERANCE = 2e-5
NEIGHBOUR = list(range(40, 90))
WINDOW = {"total_tokens": 256, "min_total_tokens": 64}
SINKS = {"total_tokens": 192, "min_total_tokens": 64, "anchor_tokens": 4, "content_segments": 1000}


@pytest.fixture(scope="module", params=[16, 32], ids=["block16", "block32"])
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(tiny_model, block_size=request.param)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


def replay(
    engine: SteppedEngine,
    oracle: Oracle,
    retention: dict[str, Any],
    *,
    num_chunks: int = 30,
    preempt_at: int | None = 20,
    request_id: str = "session",
) -> Replay:
    """Run a session beside a neighbour; check the neighbour and the block count as well."""
    assert engine.config.cache_config.enable_prefix_caching
    alone = engine.complete(NEIGHBOUR, greedy(200), request_id="alone").token_ids
    free = engine.num_free_blocks()
    oracle.restart()
    run = Replay(SteppedSession(engine, request_id, retention=retention, max_tokens=6), oracle)
    engine.send("neighbour", NEIGHBOUR, greedy(200), resumable=False)
    for i, chunk in enumerate(random_chunks(7, num_chunks, 18, 24)):
        run.push(chunk, preempt_after=3 if i == preempt_at else None)
    assert engine.answer("neighbour").token_ids == alone
    run.session.close()
    assert engine.num_free_blocks() == free
    return run


@pytest.mark.parametrize("retention", [WINDOW, SINKS], ids=["window", "sinks"])
def test_logprobs_and_greedy_tokens_equal_the_oracles(
    engine: SteppedEngine, oracle: Oracle, retention: dict[str, Any]
) -> None:
    run = replay(engine, oracle, retention)
    print(f"{run.num_steps} steps, {run.num_evictions} evictions, largest difference {run.worst:.1e}")
    assert run.num_evictions >= 3
    assert run.num_preemptions == 1
    assert run.num_greedy_misses == 0
    assert run.worst < TOLERANCE


@pytest.mark.parametrize("error", ["left out", "off by one"])
def test_the_oracle_is_sharp(
    engine: SteppedEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """With a wrong shift the same comparison fails by far, from the first eviction on and not before."""
    right = SessionBook.rope_shift

    def wrong(book: SessionBook, record: SessionRecord) -> int:
        shift = right(book, record)
        return 0 if error == "left out" or not shift else shift + 1

    monkeypatch.setattr(SessionBook, "rope_shift", wrong)
    oracle.restart()
    run = Replay(SteppedSession(engine, f"wrong-{error}", retention=WINDOW, max_tokens=6), oracle)
    before = 0.0
    for chunk in random_chunks(7, 14, 18, 24):
        run.push(chunk)
        before = run.worst if run.num_evictions == 0 else before
    run.session.close()
    assert run.num_evictions >= 3
    assert before < TOLERANCE
    assert run.worst > 1000 * TOLERANCE


@pytest.mark.parametrize("queued", [False, True], ids=["idle", "queued"])
def test_consolidation_equals_a_cold_start(short_range_model: Path, *, queued: bool) -> None:
    """After it, logprobs are those of a fresh request over the surviving window, and of the oracle all along.

    Both variants: ahead of time while the session is idle, and at the fold while chunks are queued.
    """
    engine = SteppedEngine(short_range_model)
    oracle = Oracle(short_range_model)
    try:
        session = SteppedSession(engine, "session", retention=WINDOW, max_tokens=6)
        run = Replay(session, oracle)
        chunks = random_chunks(11, 60, 4, 24)
        engine.send("neighbour", NEIGHBOUR, greedy(300), resumable=False)
        session.send(chunks[0])
        num_cold = 0
        for i, chunk in enumerate(chunks):
            if queued and i + 1 < len(chunks):
                session.send(chunks[i + 1])
            answer = engine.answer(session.id)
            run.compare_reply(chunk, answer)
            if oracle.next_position == len(oracle.tokens) and run.num_consolidations:
                num_cold += compare_with_cold_start(engine, oracle, answer)
            if not queued:
                session.rest()
                run.follow_edits(engine.events.take(session.id))
                if i == 40:
                    engine.preempt_everything()
                if i + 1 < len(chunks):
                    session.send(chunks[i + 1])
            run.follow_edits(engine.events.take(session.id))
        assert run.worst < TOLERANCE
        assert run.num_greedy_misses == 0
        assert run.num_evictions >= 3
        assert run.num_consolidations >= 3
        assert num_cold >= (3 if queued else 1)
        session.close()
    finally:
        engine.close()


def compare_with_cold_start(engine: SteppedEngine, oracle: Oracle, answer: Answer) -> int:
    """Ask a fresh request for the same reply over the same window; return 1 (one comparison made)."""
    num_kept = len(answer.token_ids) - 1
    window = oracle.tokens[: len(oracle.tokens) - num_kept]
    fresh = engine.complete(window, greedy(len(answer.token_ids)), request_id=f"cold-{len(engine.outputs)}")
    assert fresh.token_ids == answer.token_ids
    for ours, cold in zip(answer.logprobs, fresh.logprobs, strict=True):
        assert max(abs(value - cold.get(token, value)) for token, value in ours.items()) < TOLERANCE
    return 1


def test_bfloat16(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> None:
    """bf16 on the engine against the float32 oracle, teacher-forced. bf16 has 8 bits: the bound is that coarse."""
    del tmp_path_factory
    engine = SteppedEngine(tiny_model, dtype="bfloat16", block_size=32)
    oracle = Oracle(tiny_model)
    try:
        run = Replay(SteppedSession(engine, "session", retention=WINDOW, max_tokens=6), oracle)
        engine.send("neighbour", NEIGHBOUR, greedy(200), resumable=False)
        before = 0.0
        for i, chunk in enumerate(random_chunks(7, 30, 18, 24)):
            run.push(chunk, preempt_after=3 if i == 20 else None)
            before = run.worst if run.num_evictions == 0 else before
        assert run.num_evictions >= 3
        # Eviction adds no error of its own: what bf16 costs without any eviction bounds what it costs with it.
        assert run.worst < 2 * before
    finally:
        engine.close()

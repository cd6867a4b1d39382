"""Sessions that nothing bounds, in a pool smaller than the context: what does not fit alone would wait for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.engine import SteppedEngine, SteppedSession

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def engine(short_range_model: Path) -> Iterator[SteppedEngine]:
    """An engine with a context of 512 tokens and room for 320, which only one with a policy may be."""
    engine = SteppedEngine(
        short_range_model,
        num_gpu_blocks_override=21,
        kv_cache_policy={"type": "randkv", "budget": 128, "buffer_size": 16},
    )
    yield engine
    engine.close()


@pytest.fixture
def session(engine: SteppedEngine) -> Iterator[SteppedSession]:
    """A session without retention; afterwards everything has gone back and the engine answers."""
    free = engine.num_free_blocks()
    yield SteppedSession(engine, "session", retention=None)
    engine.outputs.clear()
    assert engine.num_free_blocks() == free
    assert len(engine.answer(engine.start("ordinary", [5] * 100, 4)).token_ids) == 4


def test_a_first_chunk_has_to_fit(session: SteppedSession) -> None:
    answer = session.push([7] * 317)
    assert (answer.finish_reason, answer.stop_reason) == ("error", "kvpolicy:not_admitted")
    assert answer.result is not None
    assert "at most the 320 that the KV cache holds" in answer.result["message"]
    assert len(session.push([7] * 316).token_ids) == 4
    session.close()


def test_a_later_chunk_has_to_fit_with_its_reply(session: SteppedSession) -> None:
    answer = session.push([7] * 24)
    while answer.report is None or answer.report.code is None:
        assert len(answer.token_ids) == 4
        answer = session.push([7] * 24)
    assert (answer.finish_reason, answer.stop_reason) == ("length", "kvpolicy:chunk_too_long")
    held = session.record.request.num_computed_tokens
    assert 320 - 28 < held <= 320 - 4
    # Less of it does fit, up to the last token.
    assert len(session.push([7], max_tokens=320 - held - 1).token_ids) == 320 - held - 1
    session.close()

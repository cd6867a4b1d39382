"""What a session leaves in the prefix cache: only blocks that hold a dense computation of their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.integration.engine import SteppedEngine, SteppedSession
from tests.integration.replay import random_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WINDOW = {"total_tokens": 256, "min_total_tokens": 64}


@pytest.fixture(scope="module")
def engine(short_range_model: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(short_range_model)
    yield engine
    engine.close()


def num_hits(engine: SteppedEngine, session: SteppedSession) -> int:
    """Tokens that a request with the session's own tokens and its own private salt would find computed."""
    request = session.record.request
    probe = Request(
        request_id="probe",
        prompt_token_ids=list(request.all_token_ids),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=request.cache_salt,
        block_hasher=engine.core.request_block_hasher,
    )
    return int(engine.scheduler.kv_cache_manager.get_computed_blocks(probe)[1])


def test_nothing_behind_a_hole_can_be_found_until_consolidation(engine: SteppedEngine) -> None:
    """Blocks behind a hole attended to what is gone and sit at shifted positions: finding them would be poison."""
    session = SteppedSession(engine, "a", retention=WINDOW, max_tokens=6)
    anchor = 20
    num_gapped = num_dense = 0
    for i, chunk in enumerate(random_chunks(13, 60, 18, 24)):
        session.push(chunk if i else chunk[:1] * anchor)
        session.rest()
        if session.record.ledger.evicted_width:
            # The hole begins in the first block behind the anchor.
            assert num_hits(engine, session) <= 2 * 16
            # Nor is a block behind it in the index under its present tokens, where a later lookup could come upon it.
            pool = engine.scheduler.kv_cache_manager.block_pool
            hashes = session.record.request.block_hashes[2:]
            assert all(pool.get_cached_block(block_hash, [0]) is None for block_hash in hashes)
            num_gapped += 1
        elif session.record.ledger.counts.num_consolidations:
            # Computed densely: the session would find (all but the last block of) its own window after a preemption.
            assert num_hits(engine, session) >= session.record.request.num_computed_tokens - 2 * 16
            num_dense += 1
    assert num_gapped >= 10
    assert num_dense >= 3
    session.close()


def test_two_sessions_with_the_same_content_share_nothing(engine: SteppedEngine) -> None:
    first, second = (SteppedSession(engine, name, retention=WINDOW) for name in ("a", "b"))
    for chunk in random_chunks(14, 20, 18, 24):
        one, two = first.push(chunk), second.push(chunk)
        assert one.token_ids == two.token_ids
    tables = [engine.scheduler.kv_cache_manager.get_block_ids(name)[0] for name in ("a", "b")]
    assert not set(tables[0]) & set(tables[1])
    first.close()
    second.close()

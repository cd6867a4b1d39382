"""The stock scheduler beside ours: equal where nothing is asked of us, and its own faults where it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.engine import Answer, SteppedEngine, SteppedSession, greedy
from tests.integration.replay import random_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EVERY_ENGINE = pytest.mark.parametrize("engine", ["stock", "ours"], indirect=True)
OURS = pytest.mark.parametrize("engine", ["ours"], indirect=True)
STOCK = pytest.mark.parametrize("engine", ["stock"], indirect=True)


def only_ours_passes(reason: str) -> list[object]:
    """The stock engine and ours, the stock one marked as failing (strictly: a fixed stock engine is noticed)."""
    return [pytest.param("stock", marks=pytest.mark.xfail(reason=reason, strict=True)), "ours"]


@pytest.fixture
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(tiny_model, stock=request.param == "stock")
    yield engine
    engine.close()


def test_without_retention_every_token_equals_the_stock_engines(tiny_model: Path) -> None:
    """Greedy, many chunks, two sessions and ordinary requests between them."""
    said = []
    for stock in (True, False):
        engine = SteppedEngine(tiny_model, stock=stock, max_model_len=1024)
        first, second = (SteppedSession(engine, name, retention=None, max_tokens=5) for name in ("a", "b"))
        tokens: list[object] = []
        for one, two in zip(random_chunks(1, 35, 15, 25), random_chunks(2, 35, 5, 25), strict=True):
            answer = first.push(one)
            tokens += [answer.token_ids, second.push(two).token_ids, engine.complete(one[:10]).token_ids]
        first.close()
        second.close()
        assert engine.num_free_blocks() == 199
        engine.close()
        said.append(tokens)
    assert said[0] == said[1]


def test_under_budget_every_token_equals_the_stock_engines(tiny_model: Path) -> None:
    """R.17: a session that stays within its budget is not touched."""
    said = []
    for stock in (True, False):
        engine = SteppedEngine(tiny_model, stock=stock, max_model_len=1024)
        session = SteppedSession(
            engine, "a", retention=None if stock else {"total_tokens": 1000, "min_total_tokens": 64}, max_tokens=5
        )
        said.append([session.push(chunk).token_ids for chunk in random_chunks(1, 28, 15, 25)])
        if not stock:
            assert session.record.ledger.num_evictions == 0
        session.close()
        engine.close()
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "engine", only_ours_passes("could not broadcast input array: the stock engine dies of its length"), indirect=True
)
def test_a_session_outlives_the_context_limit(engine: SteppedEngine) -> None:
    stock = not hasattr(engine.scheduler, "sessions")
    session = SteppedSession(engine, "a", retention=None if stock else {"total_tokens": 256, "min_total_tokens": 64})
    for chunk in random_chunks(1, 60, 18, 24):
        assert session.push(chunk).finish_reason == "length"


def test_the_stock_engine_dies_in_these_words(tiny_model: Path) -> None:
    engine = SteppedEngine(tiny_model, stock=True)
    session = SteppedSession(engine, "a", retention=None)

    def push_all() -> None:
        for chunk in random_chunks(1, 60, 18, 24):
            session.push(chunk)

    with pytest.raises(ValueError, match="could not broadcast"):
        push_all()
    engine.close()


@OURS
def test_without_retention_a_full_session_ends_with_an_error_and_the_others_go_on(engine: SteppedEngine) -> None:
    free = engine.num_free_blocks()
    endless = SteppedSession(engine, "endless", retention=None)
    bounded = SteppedSession(engine, "bounded", retention={"total_tokens": 256, "min_total_tokens": 64})
    answers: list[Answer] = []
    for chunk in random_chunks(1, 30, 18, 24):
        if not answers or answers[-1].finish_reason == "length":
            answers.append(endless.push(chunk))
        assert bounded.push(chunk).finish_reason == "length"
    assert answers[-1].finish_reason == "error"
    assert answers[-1].stop_reason == "kvpolicy:context_exhausted"
    assert len(answers) > 15
    assert engine.complete([5, 6, 7]).finish_reason == "length"
    bounded.close()
    assert engine.num_free_blocks() == free


@pytest.mark.parametrize("engine", only_ours_passes("the first chunk's max_tokens is used for ever"), indirect=True)
def test_each_chunk_has_its_own_max_tokens(engine: SteppedEngine) -> None:
    session = SteppedSession(engine, "a", retention=None)
    chunks = random_chunks(1, 3, 10, 10)
    assert [len(session.push(c, max_tokens=n).token_ids) for c, n in zip(chunks, (2, 9, 5), strict=True)] == [2, 9, 5]


@pytest.mark.parametrize(
    "engine", only_ours_passes("the stop reason of the chunk before is reported again"), indirect=True
)
def test_each_chunk_has_its_own_stop_reason(engine: SteppedEngine) -> None:
    session = SteppedSession(engine, "a", retention=None)
    chunk = random_chunks(1, 1, 10, 10)[0]
    token = session.push(chunk).token_ids[0]
    session.close()
    session = SteppedSession(engine, "b", retention=None)
    stopped = session.push(chunk, stop_token_ids=[token])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)
    assert session.push([5, 6, 7]).stop_reason is None


@pytest.mark.parametrize("engine", only_ours_passes("prefill statistics exist for the first chunk only"), indirect=True)
def test_each_chunk_has_its_own_prefill_statistics(engine: SteppedEngine) -> None:
    session = SteppedSession(engine, "a", retention=None)
    session.push(random_chunks(1, 1, 20, 20)[0])
    stats = session.push(random_chunks(2, 1, 10, 10)[0]).prefill
    assert stats is not None
    # 20 + 3 kept reply tokens are there, 10 are computed.
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_computed_tokens) == (33, 23, 10)


@pytest.mark.parametrize("engine", only_ours_passes("the dropped token's block hash stays in the chain"), indirect=True)
def test_the_dropped_token_leaves_the_hash_chain(engine: SteppedEngine) -> None:
    """A reply whose dropped last token completed a block must not leave that block's hash behind."""
    session = SteppedSession(engine, "a", retention=None)
    session.push(
        random_chunks(1, 1, 28, 28)[0], max_tokens=4
    )  # 28 + 4 = 32 tokens: two blocks, the last token is dropped
    session.push([9, 9, 9], max_tokens=4)
    request = engine.scheduler.requests["a"]
    kept, request.block_hashes = list(request.block_hashes), []
    request.update_block_hashes()
    assert kept == request.block_hashes


@pytest.mark.parametrize(
    "engine", only_ours_passes("without a salt, others can find a session's blocks"), indirect=True
)
def test_a_session_has_a_private_salt(engine: SteppedEngine) -> None:
    chunk = random_chunks(1, 1, 64, 64)[0]
    session = SteppedSession(engine, "a", retention=None)
    session.push(chunk)
    assert engine.complete([*chunk, 5, 6]).prefill.num_cached_tokens == 0


# Ours survives both: see the tests of the runtime of policies.
@pytest.mark.xfail(raises=RuntimeError, reason="a generator of the CPU is set back by an offset", strict=True)
@STOCK
def test_a_seeded_prompt_longer_than_a_prefill_chunk(engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 64)
    engine.complete(random_chunks(1, 1, 150, 150)[0], greedy(8, temperature=1.0, seed=3))


@pytest.mark.xfail(raises=IndexError, reason="the embedding has no such row", strict=True)
@STOCK
def test_a_token_that_the_model_does_not_have(engine: SteppedEngine) -> None:
    engine.complete([5, 320])


@OURS
def test_the_callers_parameters_are_never_changed(engine: SteppedEngine) -> None:
    session = SteppedSession(engine, "a", retention={"total_tokens": 256, "min_total_tokens": 64})
    params = session.params(max_tokens=3)
    before = repr(params)
    for chunk in random_chunks(1, 20, 18, 24):
        engine.send("a", chunk, params, resumable=True)
        engine.answer("a")
    assert repr(params) == before


@OURS
def test_a_zero_token_boundary_and_one_token_replies(engine: SteppedEngine) -> None:
    """max_tokens=1 is the realtime norm: nothing of the reply is kept."""
    session = SteppedSession(engine, "a", retention={"total_tokens": 256, "min_total_tokens": 64})
    for chunk in random_chunks(1, 30, 18, 24):
        answer = session.push(chunk, max_tokens=1)
        assert len(answer.token_ids) == 1
        assert answer.report is not None
        assert answer.report.resident_tokens <= 256
    assert greedy(1).max_tokens == 1

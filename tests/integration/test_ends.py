"""The end of a session in every state: everything goes back, exactly once, and everybody else goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvpolicy.adapters.vllm.shared.messages import ChunkMarker
from kvpolicy.core.states import SessionState
from tests.integration.engine import SteppedEngine, SteppedSession
from tests.integration.replay import random_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WINDOW = {"total_tokens": 128, "min_total_tokens": 64}


@pytest.fixture(scope="module")
def engine(short_range_model: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(short_range_model, max_num_batched_tokens=32)
    yield engine
    engine.close()


def abort_states() -> list[str]:
    return ["waiting", "prefilling", "replying", "idle", "queued", "parked", "preempted", "consolidating"]


@pytest.mark.parametrize("state", abort_states())
@pytest.mark.parametrize("how", ["abort", "close"])
def test_the_end_in_every_state_frees_everything(engine: SteppedEngine, state: str, how: str) -> None:
    free = engine.num_free_blocks()
    neighbour = SteppedSession(engine, "neighbour", retention=WINDOW)
    neighbour.push([9] * 20)
    session = SteppedSession(engine, f"{how}-{state}", retention=WINDOW, max_tokens=6)
    bring_to(engine, session, state)
    if how == "abort":
        engine.abort(session.id)
        engine.run_to_rest()
        assert session.id not in engine.scheduler.requests
    else:
        session.close()
    engine.outputs.pop(session.id, None)
    assert session.id not in engine.scheduler.sessions.records
    assert session.id not in engine.scheduler.requests
    assert engine.scheduler.num_waiting_for_streaming_input == (neighbour.record.state is SessionState.IDLE)
    assert len(neighbour.push([9] * 20).token_ids) == 4
    neighbour.close()
    assert engine.num_free_blocks() == free
    assert len(engine.complete([5, 6]).token_ids) == 4
    engine.step()
    assert not engine.scheduler.has_requests()


def test_a_session_closed_while_it_consolidates_is_gone_at_once(engine: SteppedEngine) -> None:
    session = SteppedSession(engine, "a", retention=WINDOW, max_tokens=6)
    bring_to(engine, session, "consolidating")
    engine.send("a", [0], session.params(), resumable=False)  # what close() sends
    assert "a" not in engine.scheduler.requests
    assert "a" not in engine.scheduler.sessions.records
    engine.run_to_rest()
    engine.outputs.clear()


def test_a_refused_chunk_does_not_hide_a_consolidation(engine: SteppedEngine) -> None:
    """It happened since the last reply, so the next reply reports it, whatever was refused in between."""
    session = SteppedSession(engine, "a", retention=WINDOW, max_tokens=6)
    bring_to(engine, session, "consolidating")
    session.rest()
    refused = session.push([9] * 200)
    assert refused.stop_reason == "kvpolicy:chunk_too_long"
    assert refused.report is not None
    assert not refused.report.since_reply.num_consolidations
    answer = session.push([9] * 10)
    assert answer.report is not None
    assert answer.report.since_reply.num_consolidations
    session.close()


@pytest.mark.parametrize("has_company", [True, False])
def test_a_consolidation_ahead_of_time_takes_no_blocks_from_others(engine: SteppedEngine, *, has_company: bool) -> None:
    """Where blocks are short it is given up: the session is parked, and consolidated by its next chunk anyway."""
    other = SteppedSession(engine, "other", retention=WINDOW)
    if has_company:
        other.push([9] * 60)
    session = SteppedSession(engine, "a", retention=WINDOW, max_tokens=6)
    chunks = iter(random_chunks(5, 200, 18, 24))
    session.push(next(chunks))
    while not session.record.discards_sample:
        session.push(next(chunks))
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 3)
    engine.send("behind", [5] * 20, resumable=False)
    engine.run_until(lambda: engine.is_answered("behind"), limit=20)
    assert len(engine.answer("behind").token_ids) == 4
    engine.run_to_rest()
    assert session.record.state is SessionState.PARKED
    if has_company:
        assert other.record.state is SessionState.IDLE
    pool.free_blocks(taken)
    answer = session.push(next(chunks))
    assert len(answer.token_ids) == 6
    assert answer.report is not None
    assert answer.report.counts.num_parks == 1
    session.close()
    if has_company:
        other.close()


@pytest.mark.parametrize("final", [False, True], ids=["a chunk", "the end"])
def test_what_comes_after_the_end_opens_nothing(engine: SteppedEngine, *, final: bool) -> None:
    """It is answered, so that whoever counts what was sent can count it back; a chunk is logged, too."""
    free = engine.num_free_blocks()
    session = SteppedSession(engine, "late", retention=WINDOW)
    session.push([9] * 20)
    engine.abort("late")
    engine.run_to_rest()
    engine.outputs.clear()
    engine.events.take("late")
    params = session.params()
    params.extra_args = ChunkMarker(1, first=False, final=final).to_extra_args(params.extra_args)
    engine.send("late", [9] * 20, params, resumable=not final)
    assert "late" not in engine.scheduler.requests
    assert "late" not in engine.scheduler.sessions.records
    engine.run_until(lambda: engine.is_answered("late"), limit=3)
    answer = engine.answer("late")
    assert (answer.finish_reason, answer.stop_reason) == ("abort", "kvpolicy:session_ended")
    events = engine.events.take("late")
    assert [(event.name, event.code) for event in events] == [("chunk.refused", "session_ended")] * (not final)
    engine.run_to_rest()
    assert not engine.outputs["late"]
    assert engine.num_free_blocks() == free


def bring_to(engine: SteppedEngine, session: SteppedSession, state: str) -> None:
    """Bring a session into a state; into each but the first, after it has evicted."""
    chunks = iter(random_chunks(5, 200, 18, 24))
    if state == "waiting":
        session.send(next(chunks))
        return
    for _ in range(12):
        session.push(next(chunks))
    session.rest()
    assert session.record.ledger.counts.num_evictions > 0
    {
        "prefilling": bring_to_prefill,
        "replying": bring_to_reply,
        "idle": lambda *_: None,
        "queued": bring_to_queue,
        "parked": lambda *_: engine.preempt_everything(),
        "preempted": bring_to_preemption,
        "consolidating": bring_to_consolidation,
    }[state](engine, session, chunks)
    expected = {
        "queued": SessionState.REPLYING,
        "preempted": SessionState.PREFILLING,
    }.get(state) or SessionState[state.upper()]
    assert session.record.state is expected


def bring_to_prefill(engine: SteppedEngine, session: SteppedSession, _: Iterator[list[int]]) -> None:
    session.send([11] * 60)  # two steps of prefill
    engine.step()
    assert session.record.request in engine.scheduler.running


def bring_to_reply(engine: SteppedEngine, session: SteppedSession, chunks: Iterator[list[int]]) -> None:
    session.send(next(chunks))
    engine.run_until(lambda: session.record.state is SessionState.REPLYING)


def bring_to_queue(engine: SteppedEngine, session: SteppedSession, chunks: Iterator[list[int]]) -> None:
    bring_to_reply(engine, session, chunks)
    session.send(next(chunks))
    session.send(next(chunks))


def bring_to_preemption(engine: SteppedEngine, session: SteppedSession, chunks: Iterator[list[int]]) -> None:
    bring_to_reply(engine, session, chunks)
    engine.preempt_everything()


def bring_to_consolidation(engine: SteppedEngine, session: SteppedSession, chunks: Iterator[list[int]]) -> None:
    while session.record.state is not SessionState.CONSOLIDATING:
        session.push(next(chunks))
    engine.step()


def test_a_consolidation_ahead_of_time_takes_no_slot_from_others(
    engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only slot is an idle session's."""
    other = SteppedSession(engine, "other", retention=WINDOW)
    other.push([9] * 20)
    session = SteppedSession(engine, "a", retention=WINDOW, max_tokens=6)
    chunks = iter(random_chunks(5, 200, 18, 24))
    session.push(next(chunks))
    while not session.record.discards_sample:
        session.push(next(chunks))
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "max_num_running_reqs", 1)
        engine.run_to_rest()
    assert (session.record.state, other.record.state) == (SessionState.PARKED, SessionState.IDLE)
    session.close()
    other.close()


def test_two_consolidations_ahead_of_time_take_no_blocks_from_others(engine: SteppedEngine) -> None:
    """The second is next once the first has been given up; the idle session's blocks would be enough for it."""
    other = SteppedSession(engine, "other", retention=WINDOW)
    other.push([9] * 80)
    pair = [SteppedSession(engine, name, retention=WINDOW, max_tokens=6) for name in ("a", "b")]
    chunks = iter(random_chunks(5, 200, 10, 14))
    is_due = False
    while not is_due:
        chunk = next(chunks)
        for session in pair:
            session.send(chunk)
        for session in pair:
            engine.answer(session.id)
        is_due = any(session.record.discards_sample for session in pair)
    assert all(session.record.discards_sample for session in pair)
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 3)
    engine.run_to_rest()
    assert [session.record.state for session in (*pair, other)] == [
        SessionState.PARKED,
        SessionState.PARKED,
        SessionState.IDLE,
    ]
    pool.free_blocks(taken)
    for session in (*pair, other):
        session.close()

"""Sessions beside each other and beside ordinary requests, with too little memory and too few slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.metrics.stats import PrefixCacheStats

from kvpolicy.core.states import SessionState
from tests.integration.engine import SteppedEngine, SteppedSession, greedy
from tests.integration.oracle import Oracle
from tests.integration.replay import Replay, random_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WINDOW = {"total_tokens": 128, "min_total_tokens": 64}
NUM_BLOCKS = 25  # 24 can be used: two full sessions of 8 + 1 blocks and a little more


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(
        tiny_model, num_gpu_blocks_override=NUM_BLOCKS, max_num_seqs=4, max_model_len=256, max_num_batched_tokens=256
    )
    yield engine
    assert engine.num_free_blocks() == NUM_BLOCKS - 1
    assert not engine.scheduler.requests
    engine.close()


@pytest.fixture(autouse=True)
def _nothing_is_left_over(engine: SteppedEngine) -> Iterator[None]:
    """Keep one failing test from failing the next ones."""
    yield
    engine.core.abort_requests(list(engine.scheduler.requests))
    engine.run_to_rest()
    engine.outputs.clear()
    engine.events.events.clear()


def test_two_sessions_and_ordinary_requests_under_a_small_pool(engine: SteppedEngine, tiny_model: Path) -> None:
    """Everybody is answered, idle sessions are parked when needed, and both sessions stay right to the oracle."""
    runs = [
        Replay(SteppedSession(engine, name, retention=WINDOW, max_tokens=5), Oracle(tiny_model)) for name in ("a", "b")
    ]
    for i, chunk in enumerate(random_chunks(3, 24, 14, 22)):
        for run in runs:
            run.push(chunk, preempt_after=2 if i == 15 and run is runs[0] else None)
        # 10 blocks: with both sessions resident there is no room for it.
        assert len(engine.complete(random_chunks(i, 1, 150, 150)[0], request_id=f"ordinary-{i}").token_ids) == 4
    for run in runs:
        assert run.worst < 2e-5
        assert run.num_evictions >= 3
    parks = sum(run.session.record.ledger.counts.num_parks for run in runs)
    assert parks > 0
    for run in runs:
        run.session.close()


def test_sessions_that_wait_for_each_others_blocks_all_get_on(engine: SteppedEngine) -> None:
    """Three sessions whose windows do not fit together, all pushed at once: no hold-and-wait deadlock."""
    sessions = [SteppedSession(engine, f"s{i}", retention=WINDOW, max_tokens=8) for i in range(3)]
    for chunks in zip(*(random_chunks(i, 20, 20, 30) for i in range(3)), strict=True):
        for session, chunk in zip(sessions, chunks, strict=True):
            session.send(chunk)
        for session in sessions:
            assert len(engine.answer(session.id).token_ids) == 8
    for session in sessions:
        session.close()


def test_idle_sessions_make_room_for_a_slot(engine: SteppedEngine) -> None:
    """max_num_seqs counts idle sessions: three idle ones and two ordinary requests need five of four slots."""
    sessions = [SteppedSession(engine, f"s{i}", retention=WINDOW) for i in range(3)]
    for session in sessions:
        session.push([7] * 10)
    engine.send("one", [5] * 10, greedy(30), resumable=False)
    engine.send("two", [6] * 10, greedy(30), resumable=False)
    engine.run_until(lambda: len(engine.scheduler.running) == 2, limit=5)
    assert [s.record.state for s in sessions].count(SessionState.PARKED) == 1
    assert sessions[0].record.state is SessionState.PARKED  # idle for the longest time
    assert len(engine.answer("one").token_ids) == len(engine.answer("two").token_ids) == 30
    assert len(sessions[0].push([8] * 10).token_ids) == 4
    for session in sessions:
        session.close()


def num_waiting(engine: SteppedEngine) -> int:
    """Return what vLLM's gauge ``num_requests_waiting`` shows, which is what its load balancers are told, too."""
    scheduler = engine.scheduler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "log_stats", True)
        patch.setattr(scheduler.kv_cache_manager, "make_prefix_cache_stats", PrefixCacheStats)
        stats = scheduler.make_stats()
    shown = int(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs)
    assert scheduler.get_request_counts() == (stats.num_running_reqs, shown)
    return shown


def test_a_session_counts_as_waiting_only_while_a_chunk_of_it_waits_for_the_engine(engine: SteppedEngine) -> None:
    sessions = [SteppedSession(engine, f"s{i}", retention=WINDOW, max_tokens=30) for i in range(3)]
    for session in sessions:
        for _ in range(8):
            session.push([7] * 20, max_tokens=4)
            session.rest()
    assert all(session.record.ledger.counts.num_evictions for session in sessions)
    idle, chunked, _ = sessions
    engine.preempt_everything()  # whoever is at rest is parked
    assert num_waiting(engine) == 0
    for session in (idle, chunked):
        session.push([8] * 10, max_tokens=4)
        session.rest()
    assert [s.record.state.name for s in sessions] == ["IDLE", "IDLE", "PARKED"]
    assert num_waiting(engine) == 0
    chunked.send([9] * 10)
    assert num_waiting(engine) == 1
    engine.send("ordinary", [5] * 10, greedy(30), resumable=False)
    assert num_waiting(engine) == 2
    engine.step()
    assert (idle.record.state.name, len(engine.scheduler.running), num_waiting(engine)) == ("IDLE", 2, 0)
    for name in (chunked.id, "ordinary"):
        assert len(engine.answer(name).token_ids) == 30
    for session in sessions:
        session.close()
    assert num_waiting(engine) == 0


def test_priority_decides_who_is_parked_first(engine: SteppedEngine) -> None:
    important = SteppedSession(engine, "important", retention=WINDOW, priority=0)
    other = SteppedSession(engine, "other", retention=WINDOW, priority=9)
    important.push([7] * 80)
    other.push([7] * 80)
    engine.complete([9] * 240, greedy(2))
    assert important.record.state is SessionState.IDLE
    assert other.record.state is SessionState.PARKED
    important.close()
    other.close()


def test_open_sessions_are_capped_below_the_slots(engine: SteppedEngine) -> None:
    sessions = [SteppedSession(engine, f"s{i}", retention=WINDOW) for i in range(4)]
    answers = [session.push([7] * 10) for session in sessions]
    assert [answer.finish_reason for answer in answers] == ["length", "length", "length", "error"]
    assert answers[3].stop_reason == "kvpolicy:not_admitted"
    assert answers[3].report is not None
    assert "3 are open and at most 3 may be" in str(answers[3].report.message)
    for session in sessions[:3]:
        session.close()


@pytest.mark.parametrize(
    ("retention", "reason"),
    [
        ({"total_tokens": 10_000}, "total_tokens"),
        ({"total_tokens": 128}, "min_total_tokens"),
        ({"total_token": 128}, "total_token"),
        ({"total_tokens": "many", "min_total_tokens": 1}, "total_tokens"),
        ({"total_tokens": 64, "min_total_tokens": 1}, "no room for another chunk"),
        ("not json", "JSON"),
    ],
)
def test_a_budget_that_cannot_work_ends_that_session_only(
    engine: SteppedEngine, retention: dict[str, object], reason: str
) -> None:
    good = SteppedSession(engine, "good", retention=WINDOW)
    good.push([7] * 20)
    bad = SteppedSession(engine, "bad", retention=None)
    answer = bad.push([8] * 40, extra_args={"streaming_retention": retention})
    assert answer.finish_reason == "error"
    assert answer.report is not None
    assert reason in str(answer.report.message)
    assert "bad" not in engine.scheduler.requests
    assert len(good.push([7] * 20).token_ids) == 4
    assert len(engine.complete([5, 6]).token_ids) == 4
    good.close()


def test_a_refused_chunk_changes_nothing(engine: SteppedEngine) -> None:
    session = SteppedSession(engine, "a", retention=WINDOW)
    session.push([7] * 20)
    request = session.record.request
    before = list(request.all_token_ids), request.num_computed_tokens, engine.num_free_blocks(), session.record.ledger
    params: dict[str, int]
    for chunk, params in (([8] * 100, {}), ([8] * 10, {"max_tokens": 100}), ([8] * 10, {"prompt_logprobs": 1})):
        answer = session.push(chunk, on_step=None, **params)
        assert answer.finish_reason == "length"
        assert str(answer.stop_reason).startswith("kvpolicy:")
        assert answer.token_ids == ()
        after = (
            list(request.all_token_ids),
            request.num_computed_tokens,
            engine.num_free_blocks(),
            session.record.ledger,
        )
        assert after == before
    assert session.push([8] * 10, extra_args={"streaming_retention": WINDOW | {"total_tokens": 96}}).stop_reason == (
        "kvpolicy:unsupported_parameters"
    )
    assert len(session.push([8] * 10).token_ids) == 4
    session.close()


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_refusal_comes_before_the_reply_to_the_next_chunk(engine: SteppedEngine, max_tokens: int) -> None:
    """An idle session gets a chunk that is refused and one that is not, before the next step."""
    session = SteppedSession(engine, "a", retention=WINDOW, max_tokens=max_tokens)
    session.push([7] * 20)
    session.send([8] * 120)
    session.send([9] * 10)
    refused = engine.answer("a")
    assert (refused.stop_reason, refused.token_ids) == ("kvpolicy:chunk_too_long", ())
    assert len(engine.answer("a").token_ids) == max_tokens
    session.close()


def test_an_idle_session_is_parked_before_a_running_request_is_preempted(engine: SteppedEngine) -> None:
    """A waiting request that nothing can help must not keep the running ones from an idle session's blocks."""
    session = SteppedSession(engine, "idle", retention={"total_tokens": 200, "min_total_tokens": 64}, max_tokens=2)
    session.push([7] * 46)  # 3 of 24 blocks
    engine.send("r1", [5] * 155, greedy(60), resumable=False)  # grows from 10 to 14 blocks
    engine.send("r2", [6] * 140, greedy(30), resumable=False)  # grows from 9 to 11
    engine.step()
    engine.send("head", [9] * 240, greedy(2), resumable=False)  # 16 blocks: parking 3 does not help it
    running = [engine.scheduler.requests[name] for name in ("r1", "r2")]
    engine.run_until(lambda: session.record.state is SessionState.PARKED, limit=40)
    assert not any(request.num_preemptions for request in running)


@pytest.mark.parametrize("value", [{}, {"ordinal": 0}, {"ordinal": 0, "final": True}, {"ordinal": "x"}, 3])
def test_our_own_key_in_an_ordinary_request_stops_nothing(engine: SteppedEngine, value: object) -> None:
    engine.send("x", [5, 6], greedy(2, extra_args={"kvpolicy": value}), resumable=False)
    engine.run_to_rest()
    assert engine.is_answered("x")


def test_whatever_one_session_raises_ends_that_session_only(
    engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R.13: a fault in every hook, one at a time."""
    for fault in ("fold", "stopped", "first_token", "preempted", "park", "consolidate_if_due", "rope_shift"):
        victim = SteppedSession(engine, f"victim-{fault}", retention=WINDOW)
        other = SteppedSession(engine, "other", retention=WINDOW)
        victim.push([7] * 20)
        other.push([9] * 20)
        stock = getattr(type(engine.scheduler.sessions), fault)

        def broken(book: object, record: Any, *args: object, stock: Any = stock, victim_id: str = victim.id) -> object:
            if record.request.request_id == victim_id:
                raise RuntimeError("a fault")
            return stock(book, record, *args)

        with monkeypatch.context() as patch:
            patch.setattr(type(engine.scheduler.sessions), fault, broken)
            if fault == "park":
                engine.preempt_everything()
                answer = engine.answer(victim.id)
            elif fault == "preempted":
                victim.send([7] * 10)
                engine.step()
                engine.preempt_everything()
                answer = engine.answer(victim.id)
                while answer.finish_reason != "error":
                    answer = engine.answer(victim.id)
            else:
                answer = victim.push([7] * 10)
                if answer.finish_reason != "error":
                    answer = engine.answer(victim.id)
            assert answer.finish_reason == "error", fault
            assert answer.stop_reason == "kvpolicy:internal_error"
        engine.outputs.pop(victim.id, None)
        assert victim.id not in engine.scheduler.requests
        assert engine.scheduler.num_waiting_for_streaming_input == (other.record.state is SessionState.IDLE), fault
        assert len(other.push([9] * 20).token_ids) == 4
        other.close()
    assert len(engine.complete([5, 6]).token_ids) == 4


@pytest.mark.parametrize("fault", ["close", "fail"])
def test_a_fault_in_what_notes_the_end_of_a_session_hinders_nothing(
    engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    free = engine.num_free_blocks()
    session = SteppedSession(engine, "session", retention=WINDOW)
    session.push([7] * 20)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.scheduler.sessions.events), "emit", broken)
        if fault == "fail":
            patch.setattr(type(engine.scheduler.sessions), "fold", broken)
            assert session.push([7] * 20).finish_reason == "error"
        else:
            session.close()
    engine.outputs.pop(session.id, None)
    assert session.id not in engine.scheduler.requests
    assert session.id not in engine.scheduler.sessions.records
    assert engine.num_free_blocks() == free
    assert len(engine.complete([5, 6]).token_ids) == 4


@pytest.mark.parametrize(("chunk", "min_tokens", "code"), [(0, 237, "not_admitted"), (1, 214, "context_exhausted")])
def test_a_shortest_reply_beyond_the_context_is_refused(
    engine: SteppedEngine, chunk: int, min_tokens: int, code: str
) -> None:
    """The stock engine does not look at the context limit before the shortest reply is complete."""
    session = SteppedSession(engine, "session", retention=None)
    for _ in range(chunk):
        session.push([7] * 20)
    answer = session.push([7] * 20, max_tokens=600, min_tokens=min_tokens)
    assert (answer.finish_reason, answer.stop_reason) == ("error", f"kvpolicy:{code}")
    assert len(engine.complete([5, 6]).token_ids) == 4

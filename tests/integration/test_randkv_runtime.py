"""Policies on the real engine, stepped by hand: replay, admission, prefix cache, cancellation, mixed batches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from kvpolicy.adapters.vllm.shared.messages import RequestKey
from kvpolicy.adapters.vllm.shared.options import POLICY_KEY
from tests.integration.engine import Answer, SteppedEngine, SteppedSession, greedy
from tests.integration.replay import random_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK = 16
RANDKV = {"type": "randkv", "budget": 64, "buffer_size": 8}
DUE = [73 + 8 * i for i in range(40)]
PROMPT = [5 + (23 * i) % 280 for i in range(40)]
OTHERS = ("Broken", "BrokenSchedule", "WrongEvent", "TooEarly")
PEAK_BLOCKS = 5  # 64 + 2 x 8 entries


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(
        tiny_model,
        block_size=BLOCK,
        kv_cache_policy="off",
        max_model_len=1024,
        additional_config={
            "kvpolicy": {"policies": [f"tests.integration.policies:{name}" for name in OTHERS]},
        },
    )
    yield engine
    engine.close()


def prompt(seed: int, length: int = 40) -> list[int]:
    return [5 + (seed * 31 + 23 * i + i * i * seed) % 280 for i in range(length)]


def run(engine: SteppedEngine, key: str = "a", length: int = 120, policy: Any = RANDKV, tokens: Any = PROMPT) -> Answer:
    return engine.answer(engine.start(key, tokens, length, policy=policy))


def held_blocks(engine: SteppedEngine, request_id: str) -> list[Any]:
    return list(engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks[request_id])


def pool(engine: SteppedEngine) -> Any:
    return engine.scheduler.kv_cache_manager.block_pool


# -- replay ---------------------------------------------------------------------------------------------------------


def test_a_preemption_at_any_point_around_events_changes_nothing(engine: SteppedEngine) -> None:
    """The first three events, each from two tokens before to two after, twice in a row for some."""
    expected = run(engine, length=120)
    assert expected.result is not None
    assert expected.result["num_events"] == 11
    free = engine.num_free_blocks()
    points = sorted({due - len(PROMPT) + d for due in DUE[:3] for d in range(-2, 3)} | {1, 60, 119})
    for point in points:
        most = 0

        preempt = engine.preemption_after(point)

        def watch(done: int, point: int = point, preempt: Any = preempt) -> None:
            nonlocal most
            most = max(most, len(held_blocks(engine, "a")))
            preempt(done)
            if done == point and point % 2:  # and again in the middle of the replay
                num_preemptions = engine.scheduler.requests["a"].num_preemptions
                if num_preemptions < 3 and engine.scheduler.requests["a"].num_computed_tokens:
                    engine.preempt_everything()

        engine.start("a", PROMPT, 120, policy=RANDKV)
        engine.send("neighbour", prompt(3), greedy(100), resumable=False)
        answer = engine.answer("a", on_step=watch)
        engine.answer("neighbour")
        assert answer.token_ids == expected.token_ids, point
        assert answer.result == expected.result
        assert most <= PEAK_BLOCKS
        assert engine.num_free_blocks() == free
    worst = max(
        abs(a[token] - b[token])
        for a, b in zip(expected.logprobs, answer.logprobs, strict=True)
        for token in a.keys() & b.keys()
    )
    assert worst < 2e-5


def test_a_replay_goes_from_event_to_event(engine: SteppedEngine) -> None:
    """The two seams: chunks end where events are due, and prefix hits end with the prompt."""
    engine.start("a", PROMPT, 120, policy=RANDKV)
    engine.run_until(lambda: engine.scheduler.requests["a"].num_tokens == 110)
    # A dense request publishes the very tokens of the reply as well.
    tokens = list(engine.scheduler.requests["a"].all_token_ids)
    engine.complete(tokens, greedy(2), request_id="publisher")
    request = engine.scheduler.requests["a"]
    num_blocks = len(request.all_token_ids) // BLOCK
    table_manager = engine.scheduler.kv_cache_manager
    _, hit, _ = table_manager.get_computed_blocks(request)
    assert hit > len(PROMPT)  # the trap is there
    assert num_blocks > 0
    for running in list(engine.scheduler.running):
        engine.scheduler.running.remove(running)
        engine.scheduler._preempt_request(running, 0.0)
    engine.scheduler.prev_step_scheduled_req_ids.clear()
    lengths = []
    while request.num_computed_tokens < request.num_tokens - 1:
        engine.step()
        lengths.append(request.num_computed_tokens)
    assert lengths[: lengths.index(DUE[3]) + 1] == DUE[:4]
    assert request.num_preemptions == 1
    engine.abort("a")
    engine.run_to_rest()
    engine.outputs.pop("a")


# -- seeded sampling ------------------------------------------------------------------------------------------------


def sampled(engine: SteppedEngine, key: str, length: int, *, policy: Any = RANDKV, tokens: Any = PROMPT) -> str:
    """Start a request that is sampled, with a seed of its own."""
    extra = RequestKey(key).to_extra_args({POLICY_KEY: policy})
    params = greedy(length, temperature=1.0, seed=len(key), extra_args=extra)
    engine.send(key, tokens, params, resumable=False)
    return key


def test_a_seeded_request_says_the_same_however_often_it_is_preempted(engine: SteppedEngine) -> None:
    """Chunks of a replay sample and throw away: that must not cost the request a draw."""
    keys = ("a", "bb")
    alone = [engine.answer(sampled(engine, key, 140)) for key in keys]
    assert alone[0].result is not None
    assert alone[0].result["num_events"] > 10
    assert alone[0].token_ids != alone[1].token_ids
    for key in keys:
        sampled(engine, key, 140)
    ahead = [1, 60, 61, 100, 139]

    def preempt(done: int) -> None:
        if ahead and done == ahead[0]:
            ahead.pop(0)
            engine.preempt_everything()

    answers = [engine.answer("a", on_step=preempt), engine.answer("bb")]
    assert not ahead
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
    assert [answer.result for answer in answers] == [answer.result for answer in alone]


def test_a_seeded_prompt_may_be_longer_than_a_prefill_chunk(
    engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a seeded request that is in the middle of its reply; and aborted in the middle of its prompt."""
    tokens = prompt(13, 150)
    expected = [engine.answer(sampled(engine, "a", 60)).token_ids]
    expected.append(engine.answer(sampled(engine, "long", 20, policy="off", tokens=tokens)).token_ids)
    engine.preempt_everything()  # empties the prefix cache
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 32)
    for ends in (False, True):
        sampled(engine, "a", 60)
        engine.run_until(lambda: len(engine.outputs["a"]) == 20)
        sampled(engine, "long", 20, policy="off", tokens=tokens)
        engine.run_until(lambda: 0 < engine.scheduler.requests["long"].num_computed_tokens < 100)
        if ends:
            assert [engine.answer("a").token_ids, engine.answer("long").token_ids] == expected
        else:
            engine.abort("long")
            assert engine.answer("a").token_ids == expected[0]
            engine.outputs.pop("long", None)


def test_a_seeded_session_is_computed_anew_in_as_many_chunks_as_it_takes(
    engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consolidations of 200 tokens in one chunk and in seven, and preempted in the middle of a reply."""
    retention = {"total_tokens": 256, "min_total_tokens": 64, "consolidation_threshold": 0.25}

    def said(name: str, preempted: Any = ()) -> list[tuple[int, ...]]:
        session = SteppedSession(engine, name, retention=retention, max_tokens=8)
        replies = []
        for i, chunk in enumerate(random_chunks(3, 30, 18, 24)):
            session.rest()
            preempt = engine.preemption_after(5 if i in preempted else None)
            replies.append(session.push(chunk, temperature=1.0, seed=i, on_step=preempt).token_ids)
        assert session.record.ledger.counts.num_consolidations > 1
        session.close()
        return replies

    expected = said("whole")
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 32)
    # Before anything is evicted: later on a session that is computed anew attends to less.
    assert said("chunked", preempted=(1, 2, 3)) == expected


# -- admission ------------------------------------------------------------------------------------------------------


def test_forty_requests_that_cannot_all_fit_are_never_preempted(engine: SteppedEngine) -> None:
    free = engine.num_free_blocks()
    # Room for three, and for the prompt of a fourth.
    hostage = pool(engine).get_new_blocks(free - 3 * PEAK_BLOCKS - 4)
    before = engine.scheduler.totals.num_preemptions
    ids = [engine.start(f"r{i}", prompt(i), 60 + i, policy=RANDKV) for i in range(40)]
    most = 0

    def watch(_: int) -> None:
        nonlocal most
        most = max(most, len(engine.scheduler.running))

    answers = [engine.answer(request_id, on_step=watch) for request_id in ids]
    assert [len(answer.token_ids) for answer in answers] == [60 + i for i in range(40)]
    assert engine.scheduler.totals.num_preemptions == before
    assert most == 3
    pool(engine).free_blocks(hostage)
    assert engine.num_free_blocks() == free


def test_without_the_reservation_the_same_load_preempts(engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test before it shows something."""
    manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    monkeypatch.setattr(type(manager), "reserved_growth", lambda *_: 0)
    monkeypatch.setattr(type(engine.scheduler.compactions), "bound", lambda *_: None)
    hostage = pool(engine).get_new_blocks(engine.num_free_blocks() - 3 * PEAK_BLOCKS - 2)
    before = engine.scheduler.totals.num_preemptions
    for request_id in [engine.start(f"r{i}", prompt(i), 60, policy=RANDKV) for i in range(10)]:
        engine.answer(request_id)
    assert engine.scheduler.totals.num_preemptions > before
    pool(engine).free_blocks(hostage)


@pytest.mark.parametrize(
    ("policy", "tokens", "numbers"),
    [
        ({"type": "randkv", "budget": 32}, PROMPT, ("32", "40")),
        ({"type": "randkv", "budget": 0}, PROMPT, ("budget", "0")),
        ({"type": "nope"}, PROMPT, ("nope", "randkv, sink_window")),
        ("{", PROMPT, ("kv_cache_policy",)),
        ({"type": "randkv", "budgett": 5}, PROMPT, ("budgett", "buffer_size")),
        (7, PROMPT, ("7",)),
        ("tests.integration.engine:SteppedEngine", PROMPT, ("tests.integration.policies:Broken",)),
    ],
)
def test_a_request_that_cannot_be_is_answered_at_once_and_the_engine_goes_on(
    engine: SteppedEngine, policy: Any, tokens: list[int], numbers: tuple[str, ...]
) -> None:
    free = engine.num_free_blocks()
    engine.start("bad", tokens, 200, policy=policy)
    answer = engine.answer("bad")
    assert answer.finish_reason == "error"
    assert answer.stop_reason == "kvpolicy:not_admitted"
    assert answer.result is not None
    assert all(number in answer.result["message"] for number in numbers), answer.result["message"]
    assert engine.num_free_blocks() == free
    assert "bad" not in engine.scheduler.requests
    assert len(run(engine, length=5).token_ids) == 5


# What a stock front end lets through, and the worker raises for.
DEADLY: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 320], {}),
    ([5, -321], {}),
    ([5, 1 << 31], {}),
    ([5], {"allowed_token_ids": [5, 320]}),
    ([5], {"stop_token_ids": [320], "min_tokens": 2}),
    ([5], {"logit_bias": {320: 1.0}}),
]


@pytest.mark.parametrize(("tokens", "parameters"), DEADLY)
def test_token_ids_that_the_model_does_not_have_never_reach_the_worker(
    engine: SteppedEngine, tokens: list[int], parameters: dict[str, Any]
) -> None:
    """As an ordinary request, as a session's first chunk and as a later one; the engine goes on each time."""
    free = engine.num_free_blocks()
    answer = engine.complete(tokens, greedy(4, **parameters), request_id="bad")
    assert (answer.finish_reason, answer.stop_reason) == ("error", "kvpolicy:not_admitted")
    assert answer.result is not None
    assert "from 0 to 319" in answer.result["message"]
    never = SteppedSession(engine, "never", retention=None).push(tokens, **parameters)
    assert (never.finish_reason, never.stop_reason) == ("error", "kvpolicy:not_admitted")
    session = SteppedSession(engine, "s", retention=None)
    session.push([5, 6, 7])
    refused = session.push(tokens, **parameters)
    code = "unsupported_parameters" if parameters else "unusable_chunk"
    assert (refused.finish_reason, refused.stop_reason) == ("length", f"kvpolicy:{code}")
    assert refused.report is not None
    assert "from 0 to 319" in str(refused.report.message)
    assert len(session.push([5, 319]).token_ids) == 4
    session.close()
    assert engine.num_free_blocks() == free


def test_a_second_request_of_the_same_id_leaves_the_first_alone(engine: SteppedEngine) -> None:
    expected = run(engine, length=100)
    engine.start("a", PROMPT, 100, policy=RANDKV)
    engine.run_until(lambda: engine.scheduler.requests["a"].num_tokens == 100)
    told = len(engine.outputs["a"])
    engine.start("a", prompt(2), 50, policy={"type": "randkv", "budget": 48, "buffer_size": 4})
    engine.step()
    refusals = [output for output in engine.outputs["a"][told:] if output.finish_reason is not None]
    assert [output.stop_reason for output in refusals] == ["kvpolicy:id_in_use"]
    engine.outputs["a"].remove(refusals[0])
    answer = engine.answer("a")
    assert answer.token_ids == expected.token_ids
    assert answer.result == expected.result


def test_a_key_that_cannot_be_written_is_refused(engine: SteppedEngine) -> None:
    engine.start("\ud800", PROMPT, 100, policy=RANDKV, request_id="odd")
    answer = engine.answer("odd")
    assert answer.stop_reason == "kvpolicy:not_admitted"


# -- prefix cache ---------------------------------------------------------------------------------------------------


def test_a_common_prompt_is_shared_before_and_after_events(engine: SteppedEngine) -> None:
    common = prompt(11, 52)  # three whole blocks and a bit
    alone = [run(engine, key, 90, tokens=common).token_ids for key in "ab"]
    engine.start("a", common, 90, policy=RANDKV)
    engine.start("b", common, 90, policy=RANDKV)

    def watch(_: int) -> None:
        tables = [held_blocks(engine, request_id) for request_id in "ab"]
        if all(len(table) > 3 for table in tables):
            assert tables[0][:3] == tables[1][:3]
            assert [block.ref_cnt for block in tables[0][:3]] == [2, 2, 2]
            assert not {block.block_id for block in tables[0][3:]} & {block.block_id for block in tables[1][3:]}
            # Nothing that a policy may write to is published.
            assert all(block.block_hash is None for table in tables for block in table[3:])

    answers = [engine.answer("a", on_step=watch), engine.answer("b")]
    assert [answer.token_ids for answer in answers] == alone
    assert alone[0] != alone[1]
    for answer in answers:
        assert answer.result is not None
        assert answer.result["num_events"] > 5


def test_nothing_compacted_is_found_by_its_hash(engine: SteppedEngine) -> None:
    tokens = prompt(12, 40)
    answer = run(engine, length=150, tokens=tokens)
    again = [*tokens, *answer.token_ids]
    dense = engine.complete(again, greedy(20), request_id="dense")
    assert dense.prefill.num_cached_tokens == 32
    engine.preempt_everything()  # empties the prefix cache
    assert engine.complete(again, greedy(20), request_id="fresh").token_ids == dense.token_ids


@pytest.mark.parametrize("how", ["shared", "published"])
def test_a_boundary_block_that_others_may_read_is_made_private_first(engine: SteppedEngine, how: str) -> None:
    expected = run(engine, length=60).token_ids
    free = engine.num_free_blocks()
    engine.start("a", PROMPT, 60, policy=RANDKV)
    engine.run_until(lambda: engine.scheduler.requests["a"].num_tokens == 60)
    boundary = held_blocks(engine, "a")[len(PROMPT) // BLOCK]
    if how == "shared":
        pool(engine).touch([boundary])
        cells = [cache[boundary.block_id].clone() for cache in engine.runner.kv_caches]
    else:
        donor = engine.complete(prompt(99, 48), greedy(1), request_id="donor")
        assert donor.token_ids
        pool(engine).cache_full_blocks(
            request=engine.scheduler.requests["a"],
            blocks=held_blocks(engine, "a"),
            num_cached_blocks=2,
            num_full_blocks=3,
            block_size=BLOCK,
            kv_cache_group_id=0,
        )
        assert boundary.block_hash is not None
    assert engine.answer("a").token_ids == expected
    if how == "shared":
        assert boundary.ref_cnt == 1
        assert all(
            (cache[boundary.block_id] == was).all() for cache, was in zip(engine.runner.kv_caches, cells, strict=True)
        )
        pool(engine).free_blocks([boundary])
    else:
        assert boundary.block_hash is None
    assert engine.num_free_blocks() == free


# -- cancellation, mixed batches, steps without the request ----------------------------------------------------------


def test_cancelling_at_any_step_around_an_event_frees_everything_once(engine: SteppedEngine) -> None:
    free = engine.num_free_blocks()
    for point in range(DUE[0] - len(PROMPT) - 2, DUE[1] - len(PROMPT) + 3):
        for in_step in (False, True):
            request_id = engine.start("a", PROMPT, 100, policy=RANDKV)
            engine.run_until(lambda: len(engine.outputs["a"]) >= point)  # noqa: B023 - called at once
            if in_step:
                # Scheduled, with its event, but gone before the step's outputs are processed.
                output = engine.scheduler.schedule()
                result = engine.core.model_executor.execute_model(output)
                if result is None:
                    result = engine.core.model_executor.sample_tokens(None)
                engine.abort(request_id)
                engine.scheduler.update_from_output(output, result)
            else:
                engine.abort(request_id)
            engine.run_to_rest()
            engine.outputs.pop("a", None)
            assert engine.num_free_blocks() == free
            assert not engine.scheduler.compactions.records


def test_requests_of_all_kinds_in_one_batch_do_not_notice_each_other(engine: SteppedEngine) -> None:
    kinds = {
        "small": {"type": "randkv", "budget": 48, "buffer_size": 4},
        "large": json.dumps({"type": "randkv", "budget": 100, "buffer_size": 32}),
        "every token": {"type": "randkv", "budget": 60, "buffer_size": 0},
        "window": {"type": "sink_window", "budget": 56, "buffer_size": 5},
        "blocks": {"type": "randkv", "budget": 64, "buffer_size": 8, "granularity": "block"},
        "off": "off",
        "default": None,
    }
    alone = {name: run(engine, name, 130, policy, prompt(i)) for i, (name, policy) in enumerate(kinds.items())}
    for i, (name, policy) in enumerate(kinds.items()):
        engine.start(name, prompt(i), 130, policy=policy)
    together = {
        name: engine.answer(name, on_step=engine.preemption_after(77 if name == "small" else None)) for name in kinds
    }
    for name in kinds:
        assert together[name].token_ids == alone[name].token_ids, name
        assert together[name].result == alone[name].result
        assert (together[name].result is None) == (name in {"off", "default"})


def test_an_event_is_sent_although_its_request_is_not_scheduled(engine: SteppedEngine) -> None:
    expected = run(engine, length=60).token_ids
    engine.start("a", PROMPT, 60, policy=RANDKV)
    engine.run_until(lambda: engine.scheduler.requests["a"].num_computed_tokens == DUE[0])
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    output = engine.scheduler.schedule()
    assert output.num_scheduled_tokens == {}
    assert [compaction.request_id for compaction in output.kvpolicy.compactions] == ["a"]
    engine.scheduler.update_from_output(output, engine.core.model_executor.execute_model(output))
    assert engine.scheduler.requests["a"].num_computed_tokens == DUE[0]
    assert engine.runner.requests["a"].block_ids[0] == [block.block_id for block in held_blocks(engine, "a")]
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.answer("a").token_ids == expected


def test_an_event_is_dropped_if_its_request_is_preempted_in_the_same_step(engine: SteppedEngine) -> None:
    expected = run(engine, length=60).token_ids
    dense_prompt = prompt(7, 47)  # wants its sixth block in the very step in which the other's event is due
    dense = engine.complete(dense_prompt, greedy(60), request_id="alone").token_ids
    engine.send("dense", dense_prompt, greedy(60), resumable=False)
    engine.start("a", PROMPT, 60, policy=RANDKV)
    engine.run_until(lambda: engine.scheduler.requests["a"].num_computed_tokens == DUE[0])
    assert engine.scheduler.requests["dense"].num_computed_tokens == 5 * BLOCK
    hostage = pool(engine).get_new_blocks(engine.num_free_blocks())
    output = engine.scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["dense"]
    assert output.kvpolicy.compactions == ()
    assert engine.scheduler.requests["a"].num_preemptions == 1
    result = engine.core.model_executor.execute_model(output) or engine.core.model_executor.sample_tokens(None)
    for batch in engine.scheduler.update_from_output(output, result).values():
        for sent in batch.outputs:
            engine.outputs[sent.request_id].append(sent)
    pool(engine).free_blocks(hostage)
    assert engine.answer("a").token_ids == expected
    assert engine.answer("dense").token_ids == dense


def test_the_table_of_worker_and_scheduler_agree_after_every_step(engine: SteppedEngine) -> None:
    engine.start("a", PROMPT, 120, policy=RANDKV)
    engine.start("b", prompt(2), 120, policy={"type": "randkv", "budget": 64, "buffer_size": 8, "granularity": "block"})

    def watch(_: int) -> None:
        rows = engine.runner.input_batch.block_table.block_tables[0]
        for request_id in "ab":
            row = engine.runner.input_batch.req_id_to_index.get(request_id)
            request = engine.scheduler.requests.get(request_id)
            if row is not None and request is not None and request.num_computed_tokens:
                ids = [block.block_id for block in held_blocks(engine, request_id)]
                assert engine.runner.requests[request_id].block_ids[0] == ids
                assert rows.block_table.np[row].tolist()[: len(ids)] == ids
                assert rows.num_blocks_per_row[row] == len(ids)
                # What attention went by in the last step: physical, on the device and on the host.
                physical = request.num_computed_tokens - engine.scheduler.compactions.kv_shift(request_id)
                assert int(engine.runner.seq_lens[row]) == physical
                assert int(engine.runner.optimistic_seq_lens_cpu[row]) == physical

    engine.answer("a", on_step=watch)
    engine.answer("b", on_step=watch)


def test_what_was_done_is_reported(engine: SteppedEngine) -> None:
    before = engine.scheduler.totals
    policy = {"type": "randkv", "budget": 64, "buffer_size": 16}
    answer = run(engine, length=200, policy=policy)
    stored = len(PROMPT) + 200 - 1
    num_events = 1 + (stored - 1 - 81) // 16
    assert answer.result == {
        "num_events": num_events,
        "num_dropped": 1 + 16 * (num_events - 1),
        "logical_length": stored,
        "physical_length": stored - 1 - 16 * (num_events - 1),
        "bound": 96,
        "num_blocks_returned": num_events,  # from six blocks to five each time
    }
    totals = answer.totals
    assert totals is not None
    assert totals.num_events - before.num_events == num_events
    assert totals.num_dropped - before.num_dropped == answer.result["num_dropped"]
    assert totals.num_blocks_returned - before.num_blocks_returned == num_events
    # Two layers of two KV heads. The newest r are never dropped, so each later event moves r entries.
    assert totals.num_moved - before.num_moved == 4 * answer.result["num_dropped"]
    assert totals.expand_s > before.expand_s
    assert totals.relocate_s > before.relocate_s


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Broken", "internal_error"),
        ("BrokenSchedule", "internal_error"),
        ("WrongEvent", "internal_error"),
        ("TooEarly", "not_admitted"),
    ],
)
def test_a_policy_that_fails_ends_its_own_request_alone(engine: SteppedEngine, name: str, reason: str) -> None:
    free = engine.num_free_blocks()
    expected = engine.complete(prompt(5), greedy(80), request_id="alone").token_ids
    policy = {"type": f"tests.integration.policies:{name}", "budget": 64, "buffer_size": 8}
    engine.start("bad", PROMPT, 80, policy=policy)
    engine.send("other", prompt(5), greedy(80), resumable=False)
    answer = engine.answer("bad")
    assert answer.finish_reason == "error"
    assert answer.stop_reason == f"kvpolicy:{reason}"
    assert engine.answer("other").token_ids == expected
    assert engine.num_free_blocks() == free

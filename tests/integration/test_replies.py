"""The edges of one reply: empty chunks, first tokens that stop, grammars. The session goes on after each."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from kvpolicy.adapters.vllm.shared.messages import TERMINAL
from kvpolicy.core.events import RangeEvicted
from kvpolicy.core.states import SessionState
from tests.integration.engine import SteppedEngine, SteppedSession
from tests.integration.oracle import Oracle
from tests.integration.replay import Replay, random_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

WINDOW = {"total_tokens": 128, "min_total_tokens": 64}


@pytest.fixture(scope="module")
def engine(short_range_model: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(short_range_model, max_num_batched_tokens=64)
    yield engine
    engine.close()


@pytest.fixture
def session(engine: SteppedEngine) -> Iterator[SteppedSession]:
    """A session that has evicted, beside a neighbour; afterwards everything has gone back and the engine answers."""
    free = engine.num_free_blocks()
    neighbour = SteppedSession(engine, "neighbour", retention=WINDOW)
    neighbour.push([9] * 20)
    session = SteppedSession(engine, "session", retention=WINDOW, max_tokens=6)
    for chunk in random_chunks(5, 12, 18, 24):
        session.push(chunk)
    assert session.record.ledger.counts.num_evictions > 0
    yield session
    assert len(session.push([7] * 20, max_tokens=5).token_ids) == 5
    session.close()
    assert len(neighbour.push([9] * 20).token_ids) == 4
    neighbour.close()
    assert len(engine.complete([5, 6]).token_ids) == 4
    assert engine.num_free_blocks() == free
    assert not engine.scheduler.sessions.records


def held(session: SteppedSession) -> tuple[int, ...]:
    """Return the tokens that an idle session holds: what is computed."""
    session.rest()
    request = session.record.request
    return tuple(request.all_token_ids[: request.num_computed_tokens])


def test_an_empty_chunk_is_refused(session: SteppedSession) -> None:
    before = held(session)
    answer = session.push([])
    assert (answer.finish_reason, answer.stop_reason) == ("length", "kvpolicy:empty_chunk")
    assert answer.token_ids == ()
    assert held(session) == before


def test_a_first_token_that_stops(session: SteppedSession) -> None:
    """Nothing of such a reply is kept; the session goes on."""
    chunk = random_chunks(8, 1, 20, 20)[0]
    first = session.push(chunk, max_tokens=1).token_ids
    answer = session.push(chunk, stop_token_ids=list(range(320)))
    assert len(first) == len(answer.token_ids) == 1
    assert (answer.finish_reason, answer.stop_reason) == ("stop", answer.token_ids[0])
    assert held(session)[-20:] == tuple(chunk)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_replies_of_one_token(session: SteppedSession, num_tokens: int) -> None:
    for chunk in random_chunks(9, 12, 18, 24):
        assert len(session.push(chunk, max_tokens=num_tokens).token_ids) == num_tokens
        assert held(session)[-len(chunk) - num_tokens + 1 :][: len(chunk)] == tuple(chunk)


def test_every_finish_reason_is_a_boundary_or_an_end() -> None:
    """A reason that a later vLLM adds has to be put on one side."""
    boundaries = {FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION}
    ends = {FinishReason.ABORT, FinishReason.ERROR}
    assert boundaries | ends == set(FinishReason)
    assert ends == TERMINAL


def test_a_reply_that_repeats_itself(session: SteppedSession) -> None:
    """Where it is told to, vLLM cuts it off; that is the end of a reply like any other."""
    repetition = RepetitionDetectionParams(max_pattern_size=1, min_count=4)
    answer = session.push([7] * 20, max_tokens=20, logit_bias={9: 100.0}, repetition_detection=repetition)
    assert (answer.token_ids, answer.finish_reason) == ((9,) * 4, "repetition")
    assert answer.report is not None
    assert answer.report.code is None
    assert held(session)[-23:] == (7,) * 20 + (9,) * 3


def test_no_list_that_a_worker_holds_is_edited(session: SteppedSession) -> None:
    """In one process the worker is given the request's own list, not a copy, and keeps it from step to step."""
    engine, seen = session.engine, []
    for i, chunk in enumerate(random_chunks(13, 40, 18, 24)):
        session.push(chunk, on_step=engine.preemption_after(2 if i in {1, 4} else None))
        held = engine.runner.requests[session.id].prompt_token_ids
        assert held[-len(chunk) :] == chunk
        seen.append((held, list(held)))
    assert session.record.ledger.counts.num_evictions > 10
    assert session.record.ledger.counts.num_consolidations > 0
    assert [now for now, _ in seen] == [then for _, then in seen]


def choice(*words: str) -> StructuredOutputsParams:
    params = StructuredOutputsParams(regex="|".join(words))
    params._backend = "xgrammar"  # what vLLM's front end fills in
    return params


def text_of(engine: SteppedEngine, tokens: Sequence[int]) -> str:
    return str(engine.scheduler.structured_output_manager.tokenizer.decode(tokens, skip_special_tokens=True))


def test_each_chunk_has_its_own_grammar(session: SteppedSession) -> None:
    """Ten chunks with different choices, free ones between them; a preemption inside a constrained reply."""
    engine = session.engine
    for i, chunk in enumerate(random_chunks(10, 10, 18, 24)):
        words = (f"yes{i}", f"never{i}")
        answer = session.push(
            chunk,
            max_tokens=12,
            ignore_eos=False,
            structured_outputs=choice(*words),
            on_step=engine.preemption_after(2 if i % 3 == 0 else None),
        )
        assert text_of(engine, answer.token_ids) in words
        assert answer.finish_reason == "stop"
        free = session.push(chunk)
        assert len(free.token_ids) == 6
        assert text_of(engine, free.token_ids) not in words
    assert session.record.ledger.counts.num_evictions > 3


def test_a_first_chunk_with_a_grammar(engine: SteppedEngine) -> None:
    session = SteppedSession(engine, "constrained", retention=WINDOW, max_tokens=12)
    answer = session.push([7] * 20, ignore_eos=False, structured_outputs=choice("yes", "no"))
    assert text_of(engine, answer.token_ids) in {"yes", "no"}
    assert len(session.push([7] * 20).token_ids) == 12
    session.close()


def test_a_grammar_ends_with_its_reply(session: SteppedSession) -> None:
    """A consolidation or a parking after it computes the window without any grammar."""
    engine = session.engine
    for chunk in random_chunks(11, 20, 18, 24):
        session.push(chunk, max_tokens=12, ignore_eos=False, structured_outputs=choice("yes", "no"))
        if session.record.state is SessionState.CONSOLIDATING:
            break
    assert session.record.state is SessionState.CONSOLIDATING
    assert session.record.request.structured_output_request is None
    session.rest()
    session.push([7] * 20, max_tokens=12, ignore_eos=False, structured_outputs=choice("yes", "no"))
    session.rest()
    engine.preempt_everything()
    assert session.record.is_idle
    assert engine.scheduler.sessions.blocks.num_blocks(session.id) == 0
    assert session.record.request.structured_output_request is None


def test_a_grammar_of_the_first_chunk_that_cannot_be_compiled(engine: SteppedEngine) -> None:
    """The front end refuses it; where one gets through, there is no session to go back to."""
    session = SteppedSession(engine, "session", retention=WINDOW)
    session.send([8] * 20, structured_outputs=choice("("))
    answer = engine.answer(session.id)
    assert (answer.finish_reason, answer.stop_reason) == ("error", "kvpolicy:grammar_failed")
    engine.outputs.clear()
    assert not engine.scheduler.sessions.records
    assert len(engine.complete([5, 6]).token_ids) == 4


def test_a_grammar_known_not_to_compile_costs_its_chunk(session: SteppedSession) -> None:
    session.send([7] * 20, max_tokens=20)
    session.engine.step()
    session.send([8] * 20, structured_outputs=choice("("))
    (queued,) = session.record.request.streaming_queue
    while queued.structured_output_request.grammar is None:
        time.sleep(0.001)
    assert len(session.engine.answer(session.id).token_ids) == 20
    answer = session.engine.answer(session.id)
    assert (answer.finish_reason, answer.stop_reason) == ("length", "kvpolicy:unsupported_parameters")


@pytest.mark.parametrize("while_waiting", ["nothing", "parked", "a chunk", "the end"])
def test_a_chunk_whose_grammar_fails_later_leaves_no_trace(engine: SteppedEngine, while_waiting: str) -> None:
    """A session that meets such chunks says what one without them says: through evictions and consolidations."""
    free = engine.num_free_blocks()
    session, twin = (SteppedSession(engine, name, retention=WINDOW, max_tokens=6) for name in ("session", "twin"))
    for i, chunk in enumerate(random_chunks(12, 30, 20, 20)):
        if i % 2:
            session.rest()
            session.send([8] * 20, structured_outputs=choice("yes"))
            fail_grammar(session.record.request)
            if while_waiting == "parked":
                engine.preempt_everything()
                assert engine.scheduler.sessions.blocks.num_blocks(session.id) == 0
            elif while_waiting == "a chunk":
                session.send(chunk)
            refused = engine.answer(session.id)
            assert (refused.finish_reason, refused.stop_reason) == ("length", "kvpolicy:unsupported_parameters")
            assert refused.token_ids == ()
            assert refused.report is not None
            assert "no such grammar" in str(refused.report.message)
            if while_waiting != "a chunk":
                assert session.record.request.num_tokens == session.record.ledger.num_tokens
                assert session.record.request.structured_output_request is None
        if not (i % 2 and while_waiting == "a chunk"):
            session.send(chunk)
        told, expected = engine.answer(session.id), twin.push(chunk)
        assert told.token_ids == expected.token_ids
        for ours, theirs in zip(told.logprobs, expected.logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5)
    ledgers = [one.record.ledger for one in (session, twin)]
    assert min(ledger.counts.num_evictions for ledger in ledgers) > 5
    # Parking starts the positions anew, so that no consolidation is ever due.
    assert (
        min(
            ledger.counts.num_parks if while_waiting == "parked" else ledger.counts.num_consolidations
            for ledger in ledgers
        )
        > 0
    )
    assert {ledger.num_chunks for ledger in ledgers} == {30}
    if while_waiting == "the end":
        session.rest()
        session.send([8] * 20, structured_outputs=choice("yes"))
        fail_grammar(session.record.request)
        engine.send(session.id, [0], session.params(), resumable=False)
        engine.run_to_rest()
        assert session.id not in engine.scheduler.requests
    else:
        session.close()
    twin.close()
    engine.outputs.clear()
    assert engine.num_free_blocks() == free
    assert len(engine.complete([5, 6]).token_ids) == 4


def fail_grammar(request: Any) -> None:
    """Let the compilation of a request's grammar fail, as a time-out of it does."""
    failed: Future[Any] = Future()
    failed.set_exception(ValueError("no such grammar"))
    request.structured_output_request.grammar = failed


def test_a_session_that_waits_for_its_grammar_can_be_parked(session: SteppedSession) -> None:
    session.rest()
    session.send([7] * 20, max_tokens=12, ignore_eos=False, structured_outputs=choice("yes", "no"))
    assert session.record.request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    session.engine.preempt_everything()
    assert session.engine.scheduler.sessions.blocks.num_blocks(session.id) == 0
    assert text_of(session.engine, session.engine.answer(session.id).token_ids) in {"yes", "no"}


@pytest.mark.parametrize("num_accepted", [0, 1, 3])
@pytest.mark.parametrize("queued", ["nothing", "a chunk", "the end"])
def test_a_grammar_that_rejects_a_token_ends_the_reply_only(
    engine: SteppedEngine, num_accepted: int, queued: str
) -> None:
    free = engine.num_free_blocks()
    session = SteppedSession(engine, "session", retention=WINDOW, max_tokens=8)
    for chunk in random_chunks(5, 12, 18, 24):
        session.push(chunk)
    session.rest()
    chunk = random_chunks(6, 1, 20, 20)[0]
    session.send(chunk, ignore_eos=False, structured_outputs=choice("yesyesyesyesyes", "nonononononono"))
    reject_after(session.record.request, num_accepted)
    if queued == "a chunk":
        session.send([8] * 10)
    elif queued == "the end":
        engine.send(session.id, [0], session.params(), resumable=False)
    answer = engine.answer(session.id)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "kvpolicy:grammar_rejected")
    assert len(answer.token_ids) == num_accepted
    if queued == "the end":
        engine.run_to_rest()
        assert session.id not in engine.scheduler.requests
    else:
        assert answer.report is not None
        assert answer.report.code is None
        if queued == "nothing":
            assert session.record.state is SessionState.IDLE
            # The rejected token was never computed; what is kept of the reply is what was accepted.
            assert held(session)[-20 - num_accepted :] == (*chunk, *answer.token_ids)
            session.send([8] * 10)
        assert len(engine.answer(session.id).token_ids) == 8
        session.close()
    engine.outputs.clear()
    assert engine.num_free_blocks() == free
    assert len(engine.complete([5, 6]).token_ids) == 4


def reject_after(request: Any, num_accepted: int) -> None:
    """Let a request's grammar refuse every token after so many: the mask it was sampled by should exclude that."""
    structured = request.structured_output_request
    while structured.grammar is None:  # compiled in a thread; no step is run until the request's first token
        time.sleep(0.001)
    grammar, accept, left = structured.grammar, structured.grammar.accept_tokens, [num_accepted]

    def accept_some(request_id: str, tokens: list[int]) -> bool:
        left[0] -= len(tokens)
        return left[0] >= 0 and bool(accept(request_id, tokens))

    grammar.accept_tokens = accept_some


PENALTIES = {"repetition_penalty": 1.5, "frequency_penalty": 0.2, "presence_penalty": 0.3}


def penalised(logits: torch.Tensor, repeated: set[int], reply: Sequence[int]) -> torch.Tensor:
    """Return logits as the penalties change them: the repetition's for a set, the others for one reply's tokens."""
    changed = logits.clone()
    for token in repeated:
        factor = PENALTIES["repetition_penalty"]
        changed[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(reply):
        num_uses = reply.count(token)
        changed[token] -= PENALTIES["frequency_penalty"] * num_uses + PENALTIES["presence_penalty"]
    return changed


def test_penalties_cover_what_is_held_and_this_reply(engine: SteppedEngine, short_range_model: Path) -> None:
    """The repetition's all that is resident, and nothing evicted; the other two this reply, and none before it."""
    session = SteppedSession(engine, "penalised", retention=WINDOW, max_tokens=8)
    run = Replay(session, Oracle(short_range_model))
    gone: set[int] = set()
    earlier: list[int] = []
    num_told_apart = [0, 0]
    for chunk in random_chunks(11, 12, 18, 24):
        session.rest()
        session.send(chunk, **PENALTIES)
        for event in engine.events.take(session.id):
            if isinstance(event, RangeEvicted):
                gone |= set(run.oracle.tokens[event.start : event.end])
            run.follow_edits([event])
        answer = engine.answer(session.id)
        run.oracle.feed(chunk)
        reply: list[int] = []
        for token in answer.token_ids:
            logits, held = run.oracle.logits, set(run.oracle.tokens)
            assert int(penalised(logits, held, reply).argmax()) == token
            num_told_apart[0] += int(penalised(logits, held | gone, reply).argmax()) != token
            num_told_apart[1] += int(penalised(logits, held, earlier + reply).argmax()) != token
            reply.append(token)
            if len(reply) < len(answer.token_ids):
                run.oracle.feed([token])
        earlier += reply
    # What the statements deny would have been seen.
    assert min(num_told_apart) > 0
    assert session.record.ledger.counts.num_evictions >= 3
    session.close()


def test_on_a_cpu_a_seed_counts_only_where_all_requests_of_a_step_have_one() -> None:
    """The sampler is vLLM's own: with one neighbour that has no seed, it draws for all from the process's generator."""
    sampler = TopKTopPSampler()

    def drawn(num_seeded: int, process_seed: int) -> int:
        torch.manual_seed(process_seed)
        generators = {row: torch.Generator().manual_seed(7) for row in range(num_seeded)}
        # Nothing here needs compiled code.
        with torch.compiler.set_stance("force_eager"):
            tokens, _ = sampler(torch.zeros(2, 320), generators, None, None)
        return int(tokens[0])

    assert len({drawn(2, seed) for seed in range(5)}) == 1
    assert len({drawn(1, seed) for seed in range(5)}) > 1

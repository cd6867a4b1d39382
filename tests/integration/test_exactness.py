"""A session that has evicted nothing says what one-shot generation says over the same tokens.

The reference for chunk k is an ordinary request over exactly what the session then holds: the chunks so far, and every
reply so far but its last token (which is sampled and never computed). It is asked once the sessions are closed, and
the prefix cache is emptied before it, so that it computes all its tokens in one go.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define, field, frozen

from kvpolicy.adapters.vllm.shared.session_book import SessionBook, SessionRecord
from kvpolicy.adapters.vllm.v0_28.scheduler import request_tokens
from kvpolicy.core.events import RangeEvicted, SessionPreempted
from tests.integration.engine import SteppedEngine, SteppedSession, greedy
from tests.integration.replay import random_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.integration.engine import Answer

# As against the independent oracle: float32 sums in another order.
TOLERANCE = 2e-5
# A budget that is never reached; without one, the path through the fold is another.
ROOMY = {"total_tokens": 480, "min_total_tokens": 64}
SEED = 31


@pytest.fixture(scope="module", params=[16, 32], ids=["block16", "block32"])
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(tiny_model, block_size=request.param)
    assert engine.config.cache_config.enable_prefix_caching
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _forget_events(engine: SteppedEngine) -> None:
    engine.events.events.clear()


@frozen
class Step:
    """What a session held when it answered a chunk, and the answer."""

    held: tuple[int, ...]
    answer: Answer


@define
class Script:
    """A session and the book of what it holds, kept from what was sent and said alone."""

    session: SteppedSession
    held: list[int] = field(factory=list)
    unanswered: list[tuple[list[int], int]] = field(factory=list)
    steps: list[Step] = field(factory=list)

    def send(self, chunk: list[int], max_tokens: int) -> None:
        self.unanswered.append((chunk, max_tokens))
        self.session.send(chunk, max_tokens=max_tokens)

    def take(self, answer: Answer) -> None:
        chunk, max_tokens = self.unanswered.pop(0)
        assert len(answer.token_ids) == max_tokens
        self.held += chunk
        self.steps.append(Step(tuple(self.held), answer))
        self.held += answer.token_ids[:-1]


@define
class Comparison:
    """The largest difference seen, and what did not agree at all."""

    worst: float = 0.0
    num_logprobs: int = 0
    num_greedy_misses: int = 0

    def add(self, said: Answer, one_shot: Answer) -> None:
        """Compare two answers up to the first token that differs: behind it they have nothing in common."""
        assert len(said.token_ids) == len(one_shot.token_ids)
        tokens = zip(said.token_ids, one_shot.token_ids, strict=True)
        for (ours, theirs), left, right in zip(tokens, said.logprobs, one_shot.logprobs, strict=True):
            # Where rounding swaps the last two of the top, each side reports one that the other does not.
            shared = left.keys() & right.keys()
            self.worst = max([self.worst, *(abs(left[token] - right[token]) for token in shared)])
            self.num_logprobs += len(shared)
            if ours != theirs:
                self.num_greedy_misses += 1
                return


def compare_with_one_shot(engine: SteppedEngine, steps: Sequence[Step]) -> Comparison:
    """Answer every chunk again with an ordinary request over the same tokens."""
    comparison = Comparison()
    for step in steps:
        assert engine.scheduler.reset_prefix_cache()
        one_shot = engine.complete(step.held, greedy(len(step.answer.token_ids)), request_id="one-shot")
        assert one_shot.prefill.num_computed_tokens == len(step.held)
        comparison.add(step.answer, one_shot)
    return comparison


def converse(engine: SteppedEngine, retention: dict[str, Any] | None, *, num_chunks: int) -> list[Step]:
    """Run a session beside a neighbour session, with one preemption of both in the middle of a reply."""
    session = Script(SteppedSession(engine, "session", retention=retention))
    neighbour = Script(SteppedSession(engine, "neighbour", retention=retention))
    chunks = random_chunks(SEED, num_chunks, 8, 30)
    # Both begin with the same chunk: what one of them computes must not end up in the other.
    others = [chunks[0], *random_chunks(SEED + 1, num_chunks - 1, 8, 30)]
    for i, (chunk, other) in enumerate(zip(chunks, others, strict=True)):
        neighbour.send(other, max_tokens=6)
        session.send(chunk, max_tokens=1 + i % 7)
        session.take(engine.answer("session", on_step=engine.preemption_after(3 if i == 6 else None)))
        neighbour.take(engine.answer("neighbour"))
    for script in (session, neighbour):
        script.session.close()
    return session.steps + neighbour.steps


def interleave(engine: SteppedEngine, retentions: Sequence[dict[str, Any] | None]) -> list[Step]:
    """Run sessions whose chunks come at random moments, also while earlier ones are still unanswered."""
    source = random.Random(SEED)
    scripts = [Script(SteppedSession(engine, f"session-{i}", retention=r)) for i, r in enumerate(retentions)]
    chunks = [random_chunks(SEED + i, 12, 4, 30) for i in range(len(scripts))]
    num_preemptions = 0
    while any(chunks) or any(script.unanswered for script in scripts):
        for script, left in zip(scripts, chunks, strict=True):
            if left and len(script.unanswered) < 3 and source.random() < 0.3:
                script.send(left.pop(0), max_tokens=source.randint(1, 7))
        engine.step()
        for script in scripts:
            if engine.is_answered(script.session.id):
                script.take(engine.answer(script.session.id))
        half_done = sum(map(len, chunks)) <= 6 * len(scripts)
        if half_done and num_preemptions == 0 and any(engine.outputs[script.session.id] for script in scripts):
            num_preemptions += 1
            engine.preempt_everything()
    for script in scripts:
        script.session.close()
    return [step for script in scripts for step in script.steps]


def check(engine: SteppedEngine, steps: Sequence[Step]) -> None:
    """Check that nothing was evicted, that something was preempted, and every answer."""
    assert not any(isinstance(event, RangeEvicted) for event in engine.events.events)
    assert any(isinstance(event, SessionPreempted) for event in engine.events.events)
    for step in steps:
        assert step.answer.report is not None
        assert step.answer.report.resident_tokens == len(step.held) + len(step.answer.token_ids) - 1
    comparison = compare_with_one_shot(engine, steps)
    print(f"seed {SEED}: {comparison.num_logprobs} log-probabilities, largest difference {comparison.worst:.1e}")
    assert comparison.num_greedy_misses == 0
    assert comparison.worst < TOLERANCE


@pytest.mark.parametrize("retention", [None, ROOMY], ids=["unbounded", "bounded"])
def test_chunks_equal_one_shot_generation(engine: SteppedEngine, retention: dict[str, Any] | None) -> None:
    check(engine, converse(engine, retention, num_chunks=14))


def test_interleaved_sessions_equal_one_shot_generation(engine: SteppedEngine) -> None:
    check(engine, interleave(engine, [None, ROOMY, ROOMY, None]))


def keep_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SessionBook._num_kept
    monkeypatch.setattr(SessionBook, "_num_kept", lambda book, record: right(book, record) + 1)


def shift_later_chunks_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # From the second chunk on: if all positions are one too high, nothing can be seen.
    def shift(_book: SessionBook, record: SessionRecord) -> int:
        return int(record.ledger.num_chunks > 1)

    monkeypatch.setattr(SessionBook, "rope_shift", shift)


def append_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    right = request_tokens.append_chunk

    def append(request: Any, update: Any) -> None:
        right(request, update)
        right(request, update)

    monkeypatch.setattr(request_tokens, "append_chunk", append)


@pytest.mark.parametrize("fault", [keep_the_last_token, shift_later_chunks_by_one, append_twice])
def test_the_comparison_is_sharp(
    engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    fault(monkeypatch)
    steps = converse(engine, None, num_chunks=6)
    # The first chunk of a session is folded into nothing.
    assert compare_with_one_shot(engine, steps[:1]).worst < TOLERANCE
    assert compare_with_one_shot(engine, steps).worst > 1000 * TOLERANCE

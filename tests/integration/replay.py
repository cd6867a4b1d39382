"""A session on the engine beside the oracle: the same chunks and cuts, every step's log-probabilities compared."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from kvpolicy.core.events import RangeEvicted, SessionConsolidated, SessionParked
from tests.integration.oracle import Oracle, largest_difference

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from tests.integration.engine import Answer, SteppedSession


class Replay:
    """Feeds an engine session and the oracle in step."""

    def __init__(self, session: SteppedSession, oracle: Oracle) -> None:
        self.session, self.oracle = session, oracle
        self.worst = 0.0
        self.num_steps = 0
        self.num_greedy_misses = 0
        self.num_evictions = 0
        self.num_preemptions = 0
        self.num_consolidations = 0
        self._logprobs: torch.Tensor | None = None
        self._carried: list[Any] = []

    def push(self, tokens: Sequence[int], *, preempt_after: int | None = None) -> Answer:
        """Push a chunk to both; with ``preempt_after``, everything is preempted when that many tokens are out."""
        events = self.session.engine.events
        preempted_at: list[int] = []

        def on_step(num_tokens: int) -> None:
            if preempt_after is not None and not preempted_at and num_tokens >= preempt_after:
                self.session.engine.preempt_everything()
                preempted_at.append(num_tokens)

        self.session.rest()
        self.session.send(tokens)
        self.follow_edits(self._carried + events.take(self.session.id))
        answer = self.session.engine.answer(self.session.id, on_step=on_step)
        later = events.take(self.session.id)
        self.follow_edits(event for event in later if isinstance(event, SessionParked))
        # The consolidation of an idle session comes after the reply.
        self._carried = [event for event in later if isinstance(event, SessionConsolidated)]
        self.compare_reply(tokens, answer, preempted_at=preempted_at[0] if preempted_at else None)
        return answer

    def compare_reply(self, tokens: Sequence[int], answer: Answer, *, preempted_at: int | None = None) -> None:
        """Compute a chunk and its reply on the oracle and compare every step."""
        self._logprobs = self.oracle.feed(tokens)
        for i, token in enumerate(answer.token_ids):
            if i > 0 and i == preempted_at:
                self._logprobs = self.oracle.recompute()
                self.num_preemptions += 1
            self._compare(token, answer.logprobs[i])
            if i + 1 < len(answer.token_ids):
                self._logprobs = self.oracle.feed([token])

    def follow_edits(self, events: Iterable[object]) -> None:
        """Do to the oracle's cache what the engine says it did to its own before the chunk was computed."""
        parked = False
        for event in events:
            match event:
                case RangeEvicted(start=start, end=end):
                    self.oracle.cut(start, end)
                    self.num_evictions += 1
                case SessionConsolidated():
                    self.num_consolidations += 1
                    self.oracle.recompute()
                case SessionParked():
                    parked = True
        if parked:
            # Its tokens are computed again when its chunk is: after the cuts that this chunk made.
            self.oracle.recompute()

    def _compare(self, token: int, engine_logprobs: object) -> None:
        assert self._logprobs is not None
        self.num_steps += 1
        self.worst = max(self.worst, largest_difference(self._logprobs, engine_logprobs))  # type: ignore[arg-type]
        self.num_greedy_misses += int(self._logprobs.argmax()) != token


def random_chunks(seed: int, num: int, low: int, high: int, *, vocabulary: int = 320) -> list[list[int]]:
    """Return ``num`` chunks of ``low`` to ``high`` random ordinary tokens."""
    source = random.Random(seed)
    return [[source.randrange(4, vocabulary) for _ in range(source.randint(low, high))] for _ in range(num)]

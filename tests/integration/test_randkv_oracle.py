"""Compacted generations on the real engine against an independent float32 forward with a mask per layer and KV head.

Every test has prefix caching on, a neighbour request in the batch, and a forced preemption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvpolicy.core.policies import built_in_policies
from kvpolicy.core.policy_options import policy_from
from tests.integration.engine import Answer, SteppedEngine, SteppedSession, greedy
from tests.integration.generation import GenerationOracle, visible_keys
from tests.integration.oracle import Oracle
from tests.integration.replay import Replay, random_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOLERANCE = 2e-5
NEIGHBOUR = list(range(40, 90))
PROMPT = [5 + (17 * i) % 280 for i in range(50)]
BUDGET = {"budget": 96, "buffer_size": 16}
POLICIES = {
    "head": {"type": "randkv", **BUDGET},
    "shared": {"type": "randkv", **BUDGET, "granularity": "shared"},
    "block": {"type": "randkv", **BUDGET, "granularity": "block"},
    "sink_window": {"type": "sink_window", **BUDGET},
    "no buffer": {"type": "randkv", "budget": 530, "buffer_size": 0},
}


@pytest.fixture(scope="module", params=[16, 32], ids=["block16", "block32"])
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(
        tiny_model,
        block_size=request.param,
        kv_cache_policy="off",
        max_model_len=1024,
        max_num_seqs=48,
        num_gpu_blocks_override=800,
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> GenerationOracle:
    return GenerationOracle(tiny_model)


def generate(engine: SteppedEngine, policy: Any, num_tokens: int, *, preempt_at: int | None, key: str = "a") -> Answer:
    """Generate beside a neighbour; check that the neighbour notices nothing and that every block comes back."""
    assert engine.config.cache_config.enable_prefix_caching
    alone = engine.complete(NEIGHBOUR, greedy(200), request_id="alone").token_ids
    free = engine.num_free_blocks()
    engine.start(key, PROMPT, num_tokens, policy=policy, request_id="generation")
    engine.send("neighbour", NEIGHBOUR, greedy(200), resumable=False)
    answer = engine.answer("generation", on_step=engine.preemption_after(preempt_at))
    assert engine.answer("neighbour").token_ids == alone
    assert engine.num_free_blocks() == free
    return answer


def differences(
    oracle: GenerationOracle,
    answer: Answer,
    policy: Any,
    block_size: int,
    *,
    key: str = "a",
    perturb: Any = None,
) -> tuple[list[float], int, int]:
    """Return each step's largest difference of a log-probability, the greedy misses, and the number of events."""
    tokens = [*PROMPT, *answer.token_ids]
    visible, num_events, _ = visible_keys(
        policy_from(policy, built_in_policies()),
        request_key=key,
        prompt_length=len(PROMPT),
        num_tokens=len(tokens) - 1,
        num_layers=oracle.num_layers,
        num_kv_heads=oracle.num_kv_heads,
        block_size=block_size,
        perturb=perturb,
    )
    logprobs = oracle.logprobs(tokens[:-1], visible)[len(PROMPT) - 1 :]
    misses = int((logprobs.argmax(-1) != torch.tensor(answer.token_ids)).sum())
    worst = [
        max(abs(float(expected[token]) - value) for token, value in step.items())
        for expected, step in zip(logprobs, answer.logprobs, strict=True)
    ]
    return worst, misses, num_events


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_and_logprobs_equal_the_oracles(engine: SteppedEngine, oracle: GenerationOracle, name: str) -> None:
    policy = POLICIES[name]
    answer = generate(engine, policy, 520, preempt_at=300)
    block_size = engine.config.cache_config.block_size
    worst, misses, num_events = differences(oracle, answer, policy, block_size)
    assert answer.result is not None
    print(f"{name}: {len(worst)} steps, {num_events} events, largest difference {max(worst):.1e}, {answer.result}")
    assert len(worst) == 520
    assert answer.result["num_events"] == num_events >= (12 if name == "block" else 20)
    assert misses == 0
    assert max(worst) < TOLERANCE


@pytest.mark.parametrize("error", ["one entry of one head", "one event left out in one head"])
def test_the_oracle_is_sharp(engine: SteppedEngine, oracle: GenerationOracle, error: str) -> None:
    """The same comparison fails by far when a single KV head's set is wrong, from that event on and not before."""
    policy = POLICIES["head"]
    answer = generate(engine, policy, 300, preempt_at=200)
    block_size = engine.config.cache_config.block_size

    def perturb(event: Any, layer: int, head: int, positions: tuple[int, ...]) -> tuple[int, ...]:
        if (event.ordinal, layer, head) != (2, 1, 1):
            return positions
        if error == "one entry of one head":
            dropped = next(i for i in range(len(PROMPT), max(positions)) if i not in positions)
            return (*positions[: len(PROMPT)], dropped, *positions[len(PROMPT) + 1 :])
        # Drops the oldest candidates instead of a random sample.
        return (*positions[: len(PROMPT)], *sorted(positions[len(PROMPT) :])[1:], len(PROMPT))

    worst, misses, _ = differences(oracle, answer, policy, block_size, perturb=perturb)
    third_event = 113 + 2 * 16 - len(PROMPT)
    assert max(worst[:third_event]) < TOLERANCE
    assert max(worst[third_event:]) > 100 * TOLERANCE
    print(f"{error}: largest difference {max(worst):.2f}, {misses} other tokens")


def test_sets_do_not_depend_on_the_batch(engine: SteppedEngine, oracle: GenerationOracle) -> None:
    """The same request key alone, among 8 and among 40, against the same planned sets."""
    policy = POLICIES["head"]
    block_size = engine.config.cache_config.block_size
    texts = []
    for num_others in (0, 7, 39):
        for i in range(num_others):
            other = [5 + (29 * i + 7 * j) % 280 for j in range(20 + i)]
            engine.start(f"o{i}", other, 150, policy=policy if i % 3 else None)
        engine.start("key", PROMPT, 200, policy=policy, request_id="one")
        answer = engine.answer("one", on_step=engine.preemption_after(100))
        for i in range(num_others):
            engine.answer(f"o{i}")
        worst, misses, num_events = differences(oracle, answer, policy, block_size, key="key")
        assert num_events >= 8
        assert misses == 0
        assert max(worst) < TOLERANCE
        texts.append(answer.token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_sessions_and_policies_share_an_engine(
    engine: SteppedEngine, oracle: GenerationOracle, tiny_model: Path
) -> None:
    """An evicting session and a compacted generation in the same steps, both against their oracles (R.41)."""
    policy = POLICIES["head"]
    free = engine.num_free_blocks()
    engine.start("a", PROMPT, 420, policy=policy, request_id="generation")
    session = SteppedSession(engine, "session", retention={"total_tokens": 256, "min_total_tokens": 64}, max_tokens=6)
    replay = Replay(session, Oracle(tiny_model))
    for i, chunk in enumerate(random_chunks(7, 24, 18, 24)):
        replay.push(chunk, preempt_after=3 if i == 17 else None)
    answer = engine.answer("generation")
    session.close()
    assert replay.num_evictions >= 3
    assert replay.num_greedy_misses == 0
    assert replay.worst < TOLERANCE
    worst, misses, num_events = differences(oracle, answer, policy, engine.config.cache_config.block_size)
    assert num_events >= 20
    assert misses == 0
    assert max(worst) < TOLERANCE
    assert engine.num_free_blocks() == free


@pytest.mark.parametrize("kind", [{"type": "randkv"}, "randkv"])
def test_a_session_cannot_have_a_policy(engine: SteppedEngine, kind: Any) -> None:
    session = SteppedSession(engine, "both", retention={})
    session.send(PROMPT, extra_args={"streaming_retention": {}, "kv_cache_policy": kind})
    answer = engine.answer("both")
    assert answer.finish_reason == "error"
    assert answer.report is not None
    assert "kv_cache_policy" in str(answer.report.message)

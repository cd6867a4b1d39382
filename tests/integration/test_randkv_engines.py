"""Policies on engines of their own: number formats, compilation, tensor parallelism, small pools, stock beside ours.

One engine at a time: two live ones in a process disturb each other.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from kvpolicy.core.policies import built_in_policies
from kvpolicy.core.policy_options import policy_from
from tests.integration.engine import SteppedEngine, SteppedSession, greedy
from tests.integration.generation import GenerationOracle, visible_keys
from tests.integration.test_randkv_oracle import NEIGHBOUR, POLICIES, PROMPT, TOLERANCE, differences, generate

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> GenerationOracle:
    return GenerationOracle(tiny_model)


def test_in_bfloat16_the_difference_is_that_of_the_number_format(tiny_model: Path, oracle: GenerationOracle) -> None:
    """Teacher-forced against float32: no further off than the dense engine is, over the same tokens."""
    policy = POLICIES["head"]
    engine = SteppedEngine(tiny_model, block_size=32, kv_cache_policy="off", max_model_len=1024, dtype="bfloat16")
    with closing(engine):
        answer = generate(engine, policy, 520, preempt_at=300)
        dense = generate(engine, "off", 520, preempt_at=300)
    worst, _, num_events = differences(oracle, answer, policy, 32)
    worst_dense, _, _ = differences(oracle, dense, "off", 32)
    print(f"bfloat16: compacted {max(worst):.3f}, dense {max(worst_dense):.3f}")
    assert num_events >= 20
    assert max(worst) < 0.5
    assert sum(worst) / len(worst) < 1.5 * sum(worst_dense) / len(worst_dense)


def test_chunked_prefill_and_a_long_prompt(tiny_model: Path, oracle: GenerationOracle) -> None:
    """A prompt of many chunks: no event before it is complete, the right ones after it."""
    policy = {"type": "randkv", "budget": 128, "buffer_size": 8}
    engine = SteppedEngine(
        tiny_model, block_size=16, kv_cache_policy=policy, max_model_len=1024, max_num_batched_tokens=32
    )
    long_prompt = [5 + (13 * i + i * i) % 280 for i in range(128)]  # = K
    with closing(engine):
        engine.start("a", long_prompt, 150)
        engine.send("neighbour", NEIGHBOUR, greedy(100), resumable=False)
        answer = engine.answer("a", on_step=engine.preemption_after(60))
    tokens = [*long_prompt, *answer.token_ids]
    visible, num_events, peak = visible_keys(
        policy_from(policy, built_in_policies()),
        request_key="a",
        prompt_length=128,
        num_tokens=len(tokens) - 1,
        num_layers=oracle.num_layers,
        num_kv_heads=oracle.num_kv_heads,
        block_size=16,
    )
    assert num_events == 18
    assert peak == 144
    logprobs = oracle.logprobs(tokens[:-1], visible)[127:]
    assert logprobs.argmax(-1).tolist() == list(answer.token_ids)


def test_where_nothing_fires_the_output_is_stocks(tiny_model: Path) -> None:
    """Token for token and bit for bit: a policy that never fires, and a policy engine whose requests are dense."""
    prompts = [[5 + (19 * i + 3 * j) % 280 for j in range(30 + i)] for i in range(6)]

    def answers(engine: SteppedEngine, policy: Any = None) -> list[Any]:
        with closing(engine):
            for i, tokens in enumerate(prompts):
                engine.start(f"r{i}", tokens, 90, policy=policy)
            given = [engine.answer(f"r{i}") for i in range(len(prompts))]
        return [(answer.token_ids, answer.logprobs) for answer in given]

    stock = answers(SteppedEngine(tiny_model, stock=True))
    assert answers(SteppedEngine(tiny_model, kv_cache_policy="randkv")) == stock
    assert answers(SteppedEngine(tiny_model, kv_cache_policy="randkv"), policy="off") == stock


def test_default_compilation(tiny_model: Path, oracle: GenerationOracle) -> None:
    """Not eager: the model is compiled, and the oracle still agrees."""
    engine = SteppedEngine(tiny_model, block_size=32, kv_cache_policy="off", max_model_len=1024, enforce_eager=False)
    with closing(engine):
        answer = generate(engine, POLICIES["head"], 520, preempt_at=300)
    worst, misses, num_events = differences(oracle, answer, POLICIES["head"], 32)
    print(f"compiled: largest difference {max(worst):.1e}")
    assert num_events >= 20
    assert misses == 0
    assert max(worst) < TOLERANCE


def test_two_tensor_parallel_ranks_keep_the_same_sets(tiny_model: Path, oracle: GenerationOracle) -> None:
    """Each rank holds one of the two KV heads and draws by its global number."""
    engine = SteppedEngine(tiny_model, block_size=16, kv_cache_policy="off", max_model_len=1024, tensor_parallel_size=2)
    with closing(engine):
        answer = generate(engine, POLICIES["head"], 520, preempt_at=300)
    worst, misses, num_events = differences(oracle, answer, POLICIES["head"], 16)
    print(f"two ranks: largest difference {max(worst):.1e}")
    assert num_events >= 20
    assert misses == 0
    assert max(worst) < TOLERANCE


SMALL_POOL: dict[str, Any] = {
    "max_model_len": 32768,
    "hf_overrides": {"max_position_embeddings": 32768},
    "num_gpu_blocks_override": None,
}
BOUND = {"type": "randkv", "budget": 256, "buffer_size": 32}  # at most 320 entries: 20 blocks of 16
# Two layers of two KV heads, K and V of 32 float32 elements, 16 tokens.
BLOCK_BYTES = 2 * 2 * 2 * 32 * 4 * 16


def test_a_pool_of_one_bounded_request_serves_a_context_of_32k(tiny_model: Path) -> None:
    """Stock does not even start with it; with the policy it does, and a dense request that cannot fit is refused."""
    pool = {**SMALL_POOL, "kv_cache_memory_bytes": 22 * BLOCK_BYTES}
    with pytest.raises(ValueError, match="KV cache"):
        SteppedEngine(tiny_model, stock=True, **pool)
    engine = SteppedEngine(tiny_model, kv_cache_policy=BOUND, **pool)
    with closing(engine):
        free = engine.num_free_blocks()
        assert free == 21
        most = 0

        def watch(_: int) -> None:
            nonlocal most
            most = max(most, free - engine.num_free_blocks())

        engine.start("long", PROMPT, 3000)
        assert len(engine.answer("long", on_step=watch).token_ids) == 3000
        assert most == 20
        engine.start("dense", PROMPT, 3000, policy="off")
        refusal = engine.answer("dense").result
        assert refusal is not None
        assert "191 blocks" in refusal["message"]
        assert "pool has 21" in refusal["message"]
        engine.start("too large", PROMPT, 3000, policy={"type": "randkv", "budget": 512})
        refusal = engine.answer("too large").result
        assert refusal is not None
        assert "40 blocks" in refusal["message"]
        assert "pool has 21" in refusal["message"]
        engine.start("short", PROMPT, 100, policy="off")
        assert len(engine.answer("short").token_ids) == 100
        assert engine.num_free_blocks() == free


@pytest.mark.parametrize("policy", ["off", BOUND], ids=["dense", "bounded"])
def test_no_session_is_parked_for_blocks_that_are_shared(tiny_model: Path, policy: Any) -> None:
    """A waiting request needs 11 blocks (13 with its bound) and 6 are free, but it shares 10 with a running one."""
    engine = SteppedEngine(tiny_model, kv_cache_policy="off", num_gpu_blocks_override=25, max_model_len=256)
    with closing(engine):
        session = SteppedSession(engine, "idle", retention={"total_tokens": 160, "min_total_tokens": 64})
        assert len(session.push([7] * 100).token_ids) == 4  # 7 of 24 blocks
        prompt = [5 + (13 * i + i * i) % 280 for i in range(165)]
        engine.start("first", prompt, 40, policy="off")
        engine.step()
        assert engine.num_free_blocks() == 6
        engine.start("second", prompt, 40, policy=policy)
        answer = engine.answer("second")
        assert len(answer.token_ids) == 40
        assert answer.prefill.num_cached_tokens == 160
        engine.run_to_rest()
        assert session.record.ledger.counts.num_parks == 0
        # One that shares nothing still gets the session's blocks.
        engine.start("third", prompt[::-1], 5, policy="off")
        engine.step()
        engine.start("fourth", [9] * 165, 5, policy=policy)
        assert len(engine.answer("fourth").token_ids) == 5
        assert session.record.ledger.counts.num_parks == 1
        session.close()


@pytest.mark.long
def test_32k_tokens_in_a_pool_of_one_bounded_request(tiny_model: Path) -> None:
    engine = SteppedEngine(tiny_model, kv_cache_policy=BOUND, **SMALL_POOL, kv_cache_memory_bytes=22 * BLOCK_BYTES)
    with closing(engine):
        engine.start("long", PROMPT, 32768 - len(PROMPT))
        answer = engine.answer("long")
    assert answer.result is not None
    assert answer.result["num_events"] == 1 + (32767 - 289) // 32
    assert answer.result["physical_length"] <= 320


def test_a_request_without_a_key_and_an_engine_without_policies_refuse(tiny_model: Path) -> None:
    engine = SteppedEngine(tiny_model)
    with closing(engine):
        engine.start("a", PROMPT, 5, policy="randkv")
        refusal = engine.answer("a").result
        assert refusal is not None
        assert "started without" in refusal["message"]
        assert len(engine.complete(PROMPT, greedy(5)).token_ids) == 5
    engine = SteppedEngine(tiny_model, kv_cache_policy="randkv")
    with closing(engine):
        engine.send("keyless", PROMPT, greedy(5), resumable=False)
        refusal = engine.answer("keyless").result
        assert refusal is not None
        assert "no key" in refusal["message"]

"""The call site: ``LLM`` and ``AsyncLLM`` with ``kv_cache_policy``, as a user has them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams

from kvpolicy.adapters.vllm import LLM, AsyncLLM
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.policies import RandKV

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "block_size": 16,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 100,
    "kv_cache_memory_bytes": 1 << 28,
}
POLICY = {"type": "randkv", "budget": 64, "buffer_size": 16}
PROMPT = {"prompt_token_ids": [5 + (17 * i) % 280 for i in range(40)]}


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 120, "ignore_eos": True} | more))


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(scope="module")
def log() -> Iterator[Lines]:
    logger = logging.getLogger("vllm.kvpolicy")
    handler = Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(scope="module")
def llm(tiny_model: Path, log: Lines) -> Iterator[LLM]:
    llm = LLM(model=str(tiny_model), kv_cache_policy=POLICY, **OPTIONS)
    assert log.lines == ["kv_cache_policy: RandKV(budget=64, buffer_size=16, seed=0, granularity='head')"]
    yield llm
    llm.llm_engine.engine_core.shutdown()


def generate(llm: LLM, prompts: Any, sampling: Any) -> list[Any]:
    outputs: list[Any] = llm.generate(prompts, sampling, use_tqdm=False)
    return outputs


def test_a_generation_is_compacted_and_says_so(llm: LLM) -> None:
    [output] = generate(llm, [PROMPT], params())
    assert len(output.outputs[0].token_ids) == 120
    assert output.kv_transfer_params["kvpolicy"] == {
        "num_events": 5,
        "num_dropped": 65,
        "logical_length": 159,
        "physical_length": 94,
        "bound": 96,
        "num_blocks_returned": 5,
    }
    assert llm.compaction_totals.num_events >= 5


def test_requests_draw_by_their_position_in_the_call(llm: LLM) -> None:
    """Equal prompts differ within a call, and a call that is repeated gives the same."""
    first = [output.outputs[0].token_ids for output in generate(llm, [PROMPT] * 3, params())]
    again = [output.outputs[0].token_ids for output in generate(llm, [PROMPT] * 3, params())]
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 3


def test_the_children_of_one_request_draw_apart(llm: LLM) -> None:
    [output] = generate(llm, [PROMPT], params(n=3, temperature=1e-6, seed=1))
    texts = {tuple(completion.token_ids) for completion in output.outputs}
    # All but greedy, so only the retained sets tell them apart.
    assert len({tokens[:60] for tokens in texts}) >= 1
    assert len(texts) == 3
    [again] = generate(llm, [PROMPT], params(n=3, temperature=1e-6, seed=1))
    assert texts == {tuple(completion.token_ids) for completion in again.outputs}


def test_each_request_may_have_its_own_policy(llm: LLM) -> None:
    own = [
        params(),
        params(extra_args={"kv_cache_policy": "off"}),
        params(extra_args={"kv_cache_policy": {"type": "sink_window", "budget": 64, "buffer_size": 8}}),
    ]
    outputs = generate(llm, [PROMPT] * 3, own)
    assert [(output.kv_transfer_params or {}).get("kvpolicy", {}).get("num_dropped") for output in outputs] == [
        65,
        None,
        81,
    ]
    assert own[1].extra_args == {"kv_cache_policy": "off"}  # the caller's own object is as it was


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_sent(llm: LLM) -> None:
    long_prompt = {"prompt_token_ids": list(range(5, 105))}
    with pytest.raises(ValueError, match=r"at most 64 tokens \(budget\), got 100"):
        generate(llm, [PROMPT, long_prompt], params())
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(generate(llm, [PROMPT], params(max_tokens=3))[0].outputs[0].token_ids) == 3


def test_a_stop_string_hides_nothing(llm: LLM) -> None:
    """It ends a request in the front end; the engine only hears that the request is aborted."""
    [whole] = generate(llm, [PROMPT], params())
    text = whole.outputs[0].text
    stop = next(text[i : i + 4] for i in range(len(text) * 3 // 4, len(text)) if text.index(text[i : i + 4]) == i)
    [output] = generate(llm, [PROMPT], params(stop=[stop]))
    assert output.outputs[0].finish_reason == "stop"
    num_tokens = len(output.outputs[0].token_ids)
    assert 60 < num_tokens < 120
    result = output.kv_transfer_params["kvpolicy"]
    assert result["logical_length"] == 40 + num_tokens - 1
    assert result["num_events"] >= 1
    assert result["physical_length"] == result["logical_length"] - result["num_dropped"] <= result["bound"]


def test_a_policy_may_be_any_mapping(llm: LLM) -> None:
    class Text(str):
        __slots__ = ()

    same = [
        params(extra_args={"kv_cache_policy": policy})
        for policy in (POLICY, MappingProxyType(POLICY), Text(json.dumps(POLICY)))
    ]
    outputs = [generate(llm, [PROMPT], each)[0].outputs[0].token_ids for each in same]
    assert outputs[0] == outputs[1] == outputs[2]
    huge = params(extra_args={"kv_cache_policy": {"type": "randkv", "budget": 2**70}})
    [output] = generate(llm, [PROMPT], huge)
    assert output.kv_transfer_params["kvpolicy"]["num_events"] == 0


@pytest.mark.parametrize(
    "extra",
    [
        {"kv_cache_policy": {"type": "randkv", "budget": object()}},
        {"kv_cache_policy": {"type": "randkv", "budget": [[[]]]}},
        {"kv_cache_policy": '{"type": ' + "[" * 985 + "]" * 985 + "}"},
        {"kv_cache_policy": POLICY, "streaming_retention": {}},
        {"streaming_retention": {}},
    ],
)
def test_what_a_request_cannot_ask_for_is_a_value_error_that_leaves_nothing_behind(
    llm: LLM, extra: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"."):
        generate(llm, [PROMPT, PROMPT], [params(), params(extra_args=extra)])
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(generate(llm, [PROMPT], params(max_tokens=3))[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("tokens", "more", "reason"),
    [
        ([5, 320], {}, "prompt: expected token ids from 0 to 319 .*, got 320"),
        ([5, 320], {"n": 2, "temperature": 1.0}, "prompt: expected token ids"),
        ([5, True], {}, "prompt: .*, got True"),
        ([5], {"stop_token_ids": [320], "min_tokens": 2}, "sampling_params.min_tokens with stop_token_ids .*, got 320"),
        ([5], {"stop_token_ids": [-1], "min_tokens": 2}, "got -1"),
        ([5], {"stop_token_ids": [1 << 70], "min_tokens": 2}, "got an integer of 71 bits"),
        ([5], {"logit_bias": {5: "much"}}, "Expected `float`, got `str` - at `sampling_params.logit_bias"),
        ([5], {"logit_bias": {5.5: 1.0}}, "sampling_params.logit_bias: .*, got 5.5"),
        ([5], {"logprobs": 1.5}, "got `float` - at `sampling_params.logprobs`"),
        ([5], {"seed": 1 << 64, "temperature": 1.0}, "ints"),
        ([5], {"seed": 1.5, "temperature": 1.0}, "got `float` - at `sampling_params.seed`"),
    ],
)
def test_what_would_end_the_engine_is_a_value_error_of_its_own_call(
    llm: LLM, tokens: list[int], more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        generate(llm, [PROMPT, {"prompt_token_ids": tokens}], [params(), params(**more)])
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(generate(llm, [PROMPT], params(max_tokens=3))[0].outputs[0].token_ids) == 3


def test_a_stop_token_that_the_model_does_not_have_is_as_in_vllm(llm: LLM) -> None:
    """Without a shortest reply nobody looks it up."""
    [output] = generate(llm, [PROMPT], params(max_tokens=3, stop_token_ids=[320]))
    assert output.outputs[0].finish_reason == "length"


def test_beam_search_is_refused(llm: LLM) -> None:
    with pytest.raises(PolicyUsageError, match="beam_search"):
        llm.beam_search([PROMPT], None)


@pytest.mark.parametrize(
    ("policy", "options", "reasons"),
    [
        ("nope", {}, ("unknown name 'nope'", "randkv, sink_window")),
        ({"type": "randkv", "budgett": 3, "buffer_size": -1}, {}, ("budgett", "buffer_size: expected", "-1")),
        ({"type": "randkv", "budget": 0}, {}, ("budget: expected an integer >= 1, got 0",)),
        ({"type": "randkv", "budget": "many"}, {}, ("'many'",)),
        (5, {}, ("got 5",)),
        ("no.such.module:policy", {}, ("no.such.module:policy",)),
        (".relative:policy", {}, (".relative:policy",)),
        ("tests.integration.policies:KeyErrors", {}, ("KeyErrors",)),
        ("randkv", {"additional_config": {"kvpolicy": "x"}}, ("additional_config", "str")),
        ("randkv", {"kv_cache_dtype": "bfloat16"}, ("--kv-cache-dtype bfloat16", "float32")),
        (
            "nope",
            {"async_scheduling": True, "scheduler_cls": "mine"},
            ("unknown name 'nope'", "async_scheduling", "scheduler_cls"),
        ),
        (
            {"type": "randkv", "budget": 0},
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048, "prefix_match_unit": 8},
            ("budget", "--no-enable-chunked-prefill", "--prefix-match-unit"),
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_engine_starts(
    tiny_model: Path, policy: Any, options: dict[str, Any], reasons: tuple[str, ...]
) -> None:
    for facade in (LLM, AsyncLLM):
        with pytest.raises(ValueError, match=r".") as caught:
            facade(model=str(tiny_model), kv_cache_policy=policy, **{**OPTIONS, **options})
        assert all(reason in str(caught.value) for reason in reasons), str(caught.value)


def counter(name: str) -> float:
    values = [
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"kvpolicy:compaction_{name}_total"
    ]
    return float(sum(values))


def test_the_asynchronous_engine(tiny_model: Path) -> None:
    """Keys are the caller's request ids; progress is told with the outputs; a bad request leaves the engine alone."""
    before = {name: counter(name) for name in ("events", "dropped_entries", "moved_entries", "relocate_seconds")}

    async def run() -> None:
        engine = AsyncLLM(model=str(tiny_model), kv_cache_policy=POLICY, **OPTIONS)
        try:
            num_outputs: Counter[str] = Counter()

            async def text(request_id: str, **more: Any) -> tuple[tuple[int, ...], list[Any]]:
                tokens: list[int] = []
                told: list[Any] = []
                stream = engine.generate(PROMPT, params(**more), request_id)
                async for output in stream:
                    tokens = list(output.outputs[0].token_ids)
                    if output.kv_transfer_params:
                        told.append(output.kv_transfer_params["kvpolicy"])
                        # Everything but the newest token is stored.
                        assert told[-1]["logical_length"] == len(PROMPT["prompt_token_ids"]) + len(tokens) - 1
                    num_outputs[request_id] += 1
                return tuple(tokens), told

            (first, told), (other, _), (dense, nothing) = await asyncio.gather(
                text("one"), text("two"), text("three", extra_args={"kv_cache_policy": "off"})
            )
            num_told = num_outputs["one"]
            assert first != other
            assert nothing == []
            assert len(dense) == 120
            assert (await text("one"))[0] == first
            # A key that a client slips in does not count.
            assert (await text("one", extra_args={"kvpolicy": {"request_key": "two"}}))[0] == first
            # Each output tells. Those that nobody has read in time are merged, so some moments may be missing.
            lengths = [progress["logical_length"] for progress in told]
            assert len(told) == num_told
            assert lengths == sorted(set(lengths))
            assert lengths[-1] == 159
            schedule = RandKV(budget=64, buffer_size=16).schedule(40, block_size=16)
            for progress in told:
                assert progress["num_events"] == schedule.events_due_by(progress["logical_length"] - 1)
                assert progress["physical_length"] == progress["logical_length"] - progress["num_dropped"] <= 96
            assert told[-1]["physical_length"] == 94
            with pytest.raises(PolicyUsageError, match="expected at most 64 tokens"):
                async for _ in engine.generate({"prompt_token_ids": list(range(5, 105))}, params(), "long"):
                    pass
            async with engine.open_session(retention={"total_tokens": 256, "min_total_tokens": 64}) as session:
                assert (await session.push("hello")).text
            assert (await text("one"))[0] == first
            assert engine.compaction_totals.num_events >= 20
        finally:
            engine.shutdown()

    asyncio.run(run())
    assert counter("events") - before["events"] >= 20
    assert counter("dropped_entries") - before["dropped_entries"] >= 4 * 65
    assert counter("moved_entries") > before["moved_entries"]
    assert counter("relocate_seconds") > before["relocate_seconds"]

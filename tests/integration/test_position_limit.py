"""The positions of a session stay within the rows that the model's rotary tables have for this engine."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding

from kvpolicy.adapters.vllm.v0_28.startup.guards import start_errors
from kvpolicy.adapters.vllm.v0_28.startup.position_limit import position_errors, position_limit
from kvpolicy.adapters.vllm.v0_28.worker.loaded_model import loaded_model_errors, usable_rows
from kvpolicy.core.errors import PolicyUsageError
from tests.integration.engine import SteppedEngine, SteppedSession
from tests.integration.oracle import Oracle
from tests.integration.replay import Replay, random_chunks
from tests.kinds import longrope_phi3

if TYPE_CHECKING:
    from pathlib import Path

TRAINED = 2048
HEAD_SIZE = 32
FROM_ORIGINAL = {"factor": 2.0, "original_max_position_embeddings": 512}
FACTORS = {
    "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [1.0 + i for i in range(16)],
    "original_max_position_embeddings": 512,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}


@pytest.fixture(autouse=True)
def no_tables_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM keeps tables by their parameters, and the context limit, which chooses a half, is none of those."""
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})


def configuration(model: Path, rope: dict[str, Any], max_model_len: int = 512) -> Any:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    return AsyncEngineArgs(
        model=str(model),
        max_model_len=max_model_len,
        block_size=16,
        enforce_eager=True,
        hf_overrides={"rope_parameters": parameters},
    ).create_engine_config()


def table(config: Any) -> Any:
    """Return the rotary module that vLLM's models make of a configuration."""
    parameters = dict(config.model_config.hf_text_config.rope_parameters)
    with set_current_vllm_config(config):
        return rotary_embedding.get_rope(HEAD_SIZE, TRAINED, rope_parameters=parameters, dtype=torch.float32)


def rotated(module: Any, positions: list[int]) -> torch.Tensor:
    """Return what the module makes of one and the same key at each position."""
    # DeepSeek's takes heads one by one, the others as one row.
    has_heads = isinstance(module, DeepseekScalingRotaryEmbedding)
    query = torch.ones((len(positions), 1, HEAD_SIZE) if has_heads else (len(positions), HEAD_SIZE))
    forward = getattr(module, "forward_native", module.forward)
    _, key = forward(torch.tensor(positions), query, query.clone())
    assert isinstance(key, torch.Tensor)
    return key.reshape(len(positions), HEAD_SIZE)


TYPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "default": ({}, 512, 2048),
    "proportional": ({"rope_type": "proportional"}, 512, 2048),
    "linear": ({"rope_type": "linear", "factor": 2.0}, 512, 4096),
    "ntk": ({"rope_type": "ntk", "factor": 4.0}, 512, 2048),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 512, 2048),
    "dynamic, alpha": ({"rope_type": "dynamic", "alpha": 1000.0}, 512, 2048),
    "llama3": ({"rope_type": "llama3", **LLAMA3}, 512, 2048),
    "yarn": ({"rope_type": "yarn", **FROM_ORIGINAL}, 512, 1024),
    "deepseek_yarn": ({"rope_type": "deepseek_yarn", **FROM_ORIGINAL}, 512, 1024),
    "deepseek_llama_scaling": ({"rope_type": "deepseek_llama_scaling", **FROM_ORIGINAL}, 512, 1024),
    "telechat3-yarn": ({"rope_type": "telechat3-yarn", **FROM_ORIGINAL}, 512, 2048),
    "telechat3-yarn, no original": ({"rope_type": "telechat3-yarn", "factor": 2.0}, 512, 4096),
    "longrope, short": ({"rope_type": "longrope", **FACTORS}, 512, 512),
    "longrope, long": ({"rope_type": "longrope", **FACTORS}, 513, 2048),
}


@pytest.mark.parametrize(("rope", "max_model_len", "limit"), TYPES.values(), ids=TYPES)
def test_the_limit_is_the_number_of_rows_that_positions_read_alone(
    tiny_model: Path, rope: dict[str, Any], max_model_len: int, limit: int
) -> None:
    config = configuration(tiny_model, rope, max_model_len)
    module = table(config)
    assert position_errors(config) == ()
    assert position_limit(config) == usable_rows(module) == limit
    ends = [0, 1, limit // 2, limit - 1]
    together = rotated(module, ends)
    # What a position reads depends on nothing else in the batch, and no two read the same.
    assert torch.equal(together, torch.cat([rotated(module, [position]) for position in ends]))
    assert len({tuple(row.tolist()) for row in together}) == len(ends)
    if usable_rows(module) == 512:
        # No error, and no rotation: it is row 0 of the other half.
        assert torch.equal(rotated(module, [limit]), rotated(module, [0]))
    else:
        with pytest.raises(IndexError):
            rotated(module, [limit])


def test_every_type_that_the_engine_knows_is_tried_or_refused() -> None:
    """The types are the strings that ``get_rope`` compares with: one that is new in it must be looked at."""
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(rotary_embedding.get_rope))
    known = {
        constant.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == "scaling_type"
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant)
    }
    tried = {rope.get("rope_type", "default") for rope, *_ in TYPES.values()}
    refused = {rope.get("rope_type", "default") for rope, _ in REFUSED.values()} - {"default", "nonsense"}
    assert known == tried | refused
    assert not tried & refused


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mllama4": ({"rope_type": "mllama4"}, "scaling of type 'mllama4'"),
    "xdrope": ({"rope_type": "xdrope", "alpha": 1000.0, "xdrope_section": [4] * 4}, "multi-dimensional RoPE"),
    "openpangu": (
        {"rope_type": "openpangu", "mrope_section": [4, 6, 6], "mrope_interleaved": True},
        "multi-dimensional RoPE",
    ),
    "mrope": ({"mrope_section": [4, 6, 6]}, "multi-dimensional RoPE"),
    "fope": ({"use_fope": True}, "use_fope"),
    "unknown": ({"rope_type": "nonsense"}, "scaling of type 'nonsense'"),
}


@pytest.mark.parametrize(("rope", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_type_whose_rows_are_not_known_is_refused_by_name(
    tiny_model: Path, rope: dict[str, Any], reason: str
) -> None:
    [error] = start_errors(configuration(tiny_model, rope), ["sessions"])
    assert error.startswith(f"--model {tiny_model}: ")
    assert reason in error


def test_the_limit_of_a_type_that_is_not_known_is_not_guessed(tiny_model: Path) -> None:
    with pytest.raises(PolicyUsageError, match="scaling of type 'nonsense'"):
        position_limit(configuration(tiny_model, REFUSED["unknown"][0]))


def test_dual_chunk_attention_is_refused_by_name(tiny_model: Path) -> None:
    """A row of its tables depends on more than the position."""
    config = configuration(tiny_model, {})
    config.model_config.hf_text_config.dual_chunk_attention_config = {"chunk_size": 64, "local_size": 8}
    [error] = start_errors(config, ["sessions"])
    assert "dual chunk attention" in error


def test_the_shortest_table_of_several_is_the_limit(tiny_model: Path) -> None:
    config = configuration(tiny_model, {})
    config.model_config.hf_text_config.rope_parameters = {
        "full_attention": {"rope_type": "yarn", **FROM_ORIGINAL},
        "sliding_attention": {"rope_type": "default"},
    }
    assert position_limit(config) == 1024


def test_the_tables_of_a_cohere_model_are_made_of_another_length(tiny_model: Path) -> None:
    config = configuration(tiny_model, {})
    text = config.model_config.hf_text_config
    text.model_max_length = 4096
    assert position_limit(config) == TRAINED
    text.model_type = "cohere"
    assert position_limit(config) == 4096


def test_a_context_limit_beyond_the_rows_is_refused(tiny_model: Path) -> None:
    """VLLM allows four times the positions, and makes no more rows: every request would read beyond them."""
    config = configuration(tiny_model, {"rope_type": "dynamic", "factor": 4.0}, max_model_len=8192)
    [error] = position_errors(config)
    assert error.startswith("--max-model-len 8192: expected at most 2048")
    with pytest.raises(IndexError):
        rotated(table(config), [2048])


def test_a_table_shorter_than_the_configuration_promises_is_refused(tiny_model: Path) -> None:
    longrope = {"rope_type": "longrope", **FACTORS}
    short = torch.nn.ModuleList([table(configuration(tiny_model, longrope))])
    long = configuration(tiny_model, longrope, max_model_len=1024)
    [error] = loaded_model_errors(short, long)
    assert "Phi3LongRoPEScaledRotaryEmbedding with 512 rows where its configuration promises 2048 positions" in error


@pytest.mark.parametrize("rope", ["mrope", "xdrope", "openpangu", "mllama4"])
def test_a_loaded_table_of_a_kind_that_is_not_known_is_refused_by_name(tiny_model: Path, rope: str) -> None:
    module = table(configuration(tiny_model, REFUSED[rope][0]))
    [error] = loaded_model_errors(torch.nn.ModuleList([module]), configuration(tiny_model, {}))
    assert error.endswith(f"rotary position embeddings are needed, got {type(module).__name__}")


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return longrope_phi3(tmp_path_factory.mktemp("models") / "phi3")


def test_a_session_never_reads_the_other_half_of_a_table(phi3: Path) -> None:
    """It sees twice as many tokens as the half has rows, and is consolidated in time; the oracle agrees all along."""
    engine, oracle = SteppedEngine(phi3), Oracle(phi3)
    with closing(engine):
        session = SteppedSession(
            engine, "session", retention={"total_tokens": 256, "min_total_tokens": 64}, max_tokens=6
        )
        run = Replay(session, oracle)
        highest = num_tokens = 0
        for i, chunk in enumerate(random_chunks(7, 40, 18, 24)):
            answer = run.push(chunk, preempt_after=3 if i == 20 else None)
            num_tokens += len(chunk) + len(answer.token_ids)
            highest = max(highest, oracle.next_position)
        session.close()
    print(f"{run.num_evictions} evictions, {run.num_consolidations} consolidations, {run.worst:.1e}")
    assert num_tokens > 1024
    assert 256 < highest <= 0.7 * 512
    assert run.num_evictions >= 10
    assert run.num_consolidations >= 3
    assert run.num_greedy_misses == 0
    assert run.worst < 2e-5

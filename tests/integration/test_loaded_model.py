"""What a model is gets asked of its loaded layers, before the engine is ready, and the caller reads the reason."""

from __future__ import annotations

import signal
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.registry import ModelRegistry

from kvpolicy.adapters.vllm.shared.refusals import notes_path
from kvpolicy.adapters.vllm.v0_28.startup.engine_args import checked_config
from kvpolicy.adapters.vllm.v0_28.worker import runner_v1 as worker_runner
from kvpolicy.adapters.vllm.v0_28.worker.loaded_model import loaded_model_errors
from kvpolicy.adapters.vllm.v0_28.worker.make_compactor import make_compactor
from kvpolicy.cli.serve import run_serve
from kvpolicy.core.errors import EngineContractError, PolicyUsageError
from tests.integration.engine import SteppedEngine, SteppedSession
from tests.integration.oracle import Oracle
from tests.integration.replay import Replay, random_chunks
from tests.kinds import alibi_falcon, capped_gemma2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIRST = "model.layers.0.self_attn.attn"
SECOND = "model.layers.1.self_attn.attn"
SHARED = f"got the keys and values of another layer ({FIRST}) ({SECOND})"
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 512,
    "block_size": 16,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 100,
    "kv_cache_memory_bytes": 1 << 28,
}


class SharingLlama(LlamaForCausalLM):  # type: ignore[misc] # vLLM is not typed
    """A Llama whose second layer reads the cache of the first; its configuration does not say so."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        layer = vllm_config.compilation_config.static_forward_context[SECOND]
        layer.kv_sharing_target_layer_name = layer.impl.kv_sharing_target_layer_name = FIRST


@pytest.fixture(scope="module")
def sharing() -> dict[str, Any]:
    """Arguments that make a sharing Llama of a tiny model."""
    ModelRegistry.register_model("SharingLlama", SharingLlama)
    return {"hf_overrides": {"architectures": ["SharingLlama"]}}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(tiny_model, kv_cache_policy="off")
    yield engine
    engine.close()


def errors(engine: SteppedEngine) -> tuple[str, ...]:
    return loaded_model_errors(engine.runner.get_model(), engine.config)


def test_a_plain_model_has_nothing_against_it(engine: SteppedEngine) -> None:
    assert errors(engine) == ()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("impl.alibi_slopes", torch.ones(4), "got ALiBi slopes"),
        ("sliding_window", 64, "got a sliding window of 64"),
        ("has_sink", True, "got attention sinks"),
        ("attn_type", "encoder_only", "got attention of type encoder_only"),
        ("kv_sharing_target_layer_name", FIRST, "got the keys and values of another layer"),
        ("__class__", ChunkedLocalAttention, "got a layer of type ChunkedLocalAttention"),
    ],
)
def test_each_property_of_a_layer_is_named_with_the_layer(
    engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, reason: str
) -> None:
    layer: Any = engine.runner.vllm_config.compilation_config.static_forward_context[SECOND]
    *owner, attribute = name.split(".")
    monkeypatch.setattr(layer.impl if owner else layer, attribute, value)
    [error] = errors(engine)
    assert reason in error
    assert SECOND in error
    assert f"--model {engine.config.model_config.model}: full causal attention" in error


def test_all_reasons_come_at_once_and_each_property_once(
    engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (FIRST, SECOND):
        layer: Any = engine.runner.vllm_config.compilation_config.static_forward_context[name]
        monkeypatch.setattr(layer, "sliding_window", 64)
        monkeypatch.setattr(layer.impl, "alibi_slopes", torch.ones(4))
    slopes, window = errors(engine)
    assert slopes.endswith(f"got ALiBi slopes ({FIRST} and 1 more)")
    assert window.endswith(f"got a sliding window of 64 ({FIRST} and 1 more)")


def test_a_model_without_a_rotary_table_is_refused(engine: SteppedEngine) -> None:
    [error] = loaded_model_errors(torch.nn.Linear(1, 1), engine.config)
    assert "rotary position embeddings are needed, got none" in error


def test_an_image_encoder_may_rotate_as_it_likes(engine: SteppedEngine) -> None:
    """Its positions are its own: the decoder's tables alone are looked at."""
    decoder = engine.runner.get_model()
    whole = torch.nn.ModuleDict({"vision": torch.nn.Linear(1, 1), "text": decoder})
    both: Any = SimpleNamespace(
        supports_multimodal=True, get_language_model=lambda: decoder, modules=whole["vision"].modules
    )
    assert loaded_model_errors(both, engine.config) == ()


def test_a_falcon_with_alibi_is_refused_before_its_weights_are_loaded(tmp_path: Path) -> None:
    model = alibi_falcon(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for policy in (None, "randkv"):
        with pytest.raises(PolicyUsageError, match=rf"--model {model}: .*got ALiBi"):
            checked_config({**OPTIONS, "model": str(model)}, kv_cache_policy=policy)


def test_a_falcon_with_alibi_is_refused_by_its_layers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its configuration said nothing: what the attention layers got is enough."""
    model = alibi_falcon(tmp_path)
    monkeypatch.setattr("kvpolicy.adapters.vllm.v0_28.startup.guards.model_errors", lambda *_: ())
    with pytest.raises(PolicyUsageError) as caught:
        SteppedEngine(model)
    slopes, rotary = caught.value.reasons
    assert "got ALiBi slopes (transformer.h.0.self_attention.attn and 1 more)" in slopes
    assert "rotary position embeddings are needed, got none" in rotary


def test_a_soft_cap_is_not_in_the_way(tmp_path: Path) -> None:
    """It bends each logit by itself: after evictions the oracle, which has the cap, agrees; one without does not."""
    model = capped_gemma2(tmp_path)
    engine, oracle = SteppedEngine(model), Oracle(model)
    uncapped = Oracle(model, attn_logit_softcapping=None)
    with closing(engine):
        layers = engine.runner.vllm_config.compilation_config.static_forward_context
        assert {layer.impl.logits_soft_cap for layer in layers.values()} == {2.0}
        session = SteppedSession(
            engine, "session", retention={"total_tokens": 128, "min_total_tokens": 64}, max_tokens=4
        )
        run = Replay(session, oracle)
        chunks = random_chunks(7, 12, 18, 24)
        for chunk in chunks:
            run.push(chunk)
        session.close()
    assert run.num_evictions >= 3
    assert run.num_greedy_misses == 0
    assert run.worst < 2e-5
    capped = Oracle(model).feed(chunks[0])
    assert float((capped - uncapped.feed(chunks[0])).abs().max()) > 0.1


def test_layers_that_share_a_cache_are_refused(tiny_model: Path, sharing: dict[str, Any]) -> None:
    with pytest.raises(PolicyUsageError) as caught:
        SteppedEngine(tiny_model, kv_cache_policy="off", **sharing)
    [reason] = caught.value.reasons
    assert SHARED in reason


def test_no_tensor_is_compacted_twice(
    tiny_model: Path, sharing: dict[str, Any], engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the layers said nothing: the tensors themselves are one. Those of a plain model are as many as layers."""
    caches = engine.runner.kv_caches
    assert len({cache.data_ptr() for cache in caches}) == len(caches) == 2
    shared: list[Any] = []

    def noted(caches: Any, *rest: Any) -> Any:
        shared.extend(caches)
        return make_compactor(caches, *rest)

    monkeypatch.setattr(worker_runner, "loaded_model_errors", lambda *_: ())
    monkeypatch.setattr(worker_runner, "make_compactor", noted)
    with pytest.raises(EngineContractError, match="a tensor of its own for every layer, got one that layers share"):
        SteppedEngine(tiny_model, kv_cache_policy="off", **sharing)
    assert len(shared) == 2
    assert len({cache.data_ptr() for cache in shared}) == 1


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """Those of this process; a server puts its own in their place."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signal_handlers")
def test_the_reasons_pass_from_two_workers_through_the_engine_to_what_the_server_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's engine is an ``AsyncLLM``. Each reason is there once, though each worker gives it.

    As if the configuration said nothing, in this process: those of the engine are whole.
    """
    monkeypatch.setattr("kvpolicy.adapters.vllm.v0_28.startup.guards.model_errors", lambda *_: ())
    model = alibi_falcon(tmp_path)
    flags = "--enable-streaming --max-model-len 512 --max-num-seqs 8 --enforce-eager --dtype float32 --port 0"
    more = "--tensor-parallel-size 2 --num-gpu-blocks-override 100 --kv-cache-memory-bytes 268435456 --block-size 16"
    assert run_serve([str(model), *flags.split(), *more.split()]) == 2
    slopes, rotary = (line for line in capsys.readouterr().err.splitlines() if line.startswith("kvpolicy serve: "))
    assert slopes == (
        f"kvpolicy serve: --model {model}: full causal attention over a cache of its own is needed in every layer, "
        "got ALiBi slopes (transformer.h.0.self_attention.attn and 1 more)"
    )
    assert rotary.endswith(f"--model {model}: rotary position embeddings are needed, got none that is vLLM's own")
    assert not notes_path().exists()

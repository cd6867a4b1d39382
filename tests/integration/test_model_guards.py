"""Models that sessions and policies refuse: by a property of the model, on every facade, before anything is loaded."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig
from vllm import ModelRegistry
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpolicy.adapters.vllm.v0_28.frontend.async_llm import AsyncLLM
from kvpolicy.adapters.vllm.v0_28.frontend.llm import LLM
from kvpolicy.adapters.vllm.v0_28.server.process import parsed, server_config
from kvpolicy.adapters.vllm.v0_28.startup import engine_args
from kvpolicy.adapters.vllm.v0_28.startup.engine_args import checked_config
from kvpolicy.adapters.vllm.v0_28.startup.guards import compaction_errors, config_errors
from kvpolicy.adapters.vllm.v0_28.startup.kv_spec import BoundedAttentionSpec
from kvpolicy.adapters.vllm.v0_28.startup.model_guards import layer_errors, model_errors
from kvpolicy.adapters.vllm.v0_28.worker import runner_v1
from kvpolicy.adapters.vllm.v0_28.worker.make_compactor import make_compactor
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.serving import SERVE_FLAGS, diagnose
from tests.integration.engine import SteppedEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HYBRID = "full causal attention is needed in every layer, got a hybrid model (layers with a state beside attention)"
LATENT = "full causal attention is needed in every layer, got multi-head latent attention"
NO_ROTATION = "rotary position embeddings are needed, its configuration has none (no rope_parameters)"
ALIBI = "rotary position embeddings are needed, got ALiBi (it counts the entries between two tokens)"


def instead(kind: str) -> str:
    return f"full causal attention is needed in every layer, got {kind}"


# Class, its module in vLLM, the configuration's type and changes, what is said.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid", {}, [HYBRID]),
    "lfm2": ("Lfm2ForCausalLM", "lfm2", {}, [HYBRID]),
    "jamba": ("JambaForCausalLM", "jamba", {}, [HYBRID, NO_ROTATION]),
    "mamba": ("MambaForCausalLM", "mamba", {}, [instead("no attention")]),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "deepseek_v2", {}, [LATENT]),
    "mistral": ("MistralForCausalLM", "mistral", {"sliding_window": 64}, [instead("a sliding window of 64")]),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", {}, [instead("a sliding window of 4096")]),
    "llama4_text": ("Llama4ForCausalLM", "llama4", {}, [instead("attention in chunks of 8192")]),
    "bert": ("BertModel", "bert", {}, ["a model that generates text is needed, got one for pooling", NO_ROTATION]),
    "gpt2": ("GPT2LMHeadModel", "gpt2", {}, [NO_ROTATION]),
    "bloom": ("BloomForCausalLM", "bloom", {}, [ALIBI]),
    "falcon": ("FalconForCausalLM", "falcon", {"alibi": True}, [ALIBI]),
    "gptj": ("GPTJForCausalLM", "gpt_j", {}, []),
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Make a folder with a family's configuration and no weights."""
    named = dict(ModelRegistry.models)

    def made(model_type: str, **more: Any) -> Path:
        architecture, module, changes, _ = FAMILIES[model_type]
        vllm_module = importlib.import_module(f"vllm.model_executor.models.{module}")
        vllm_class = named[architecture].class_name
        # A class is looked at here, a name in a process of its own, which takes seconds.
        ModelRegistry.register_model(architecture, getattr(vllm_module, vllm_class))
        folder = tmp_path_factory.mktemp(model_type)
        config = AutoConfig.for_model(model_type, **changes, **more)
        config.architectures = [architecture]
        config.save_pretrained(folder)
        return folder

    yield made
    ModelRegistry.models.update(named)


def refused(call: Callable[[], object]) -> list[str]:
    with pytest.raises(PolicyUsageError) as caught:
        call()
    return list(caught.value.reasons)


OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 512, "dtype": "float32"}
FLAGS = ("--max-model-len", "256", "--max-num-batched-tokens", "512", "--dtype", "float32")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_refused_for_what_it_is_and_for_nothing_else(family: Callable[..., Path], model_type: str) -> None:
    folder, expected = family(model_type), FAMILIES[model_type][3]
    if expected:
        reasons = refused(lambda: checked_config({"model": str(folder), **OPTIONS}, kv_cache_policy="randkv"))
        assert reasons == [f"--model {folder}: sessions and kv_cache_policy: {reason}" for reason in expected]
    else:
        assert checked_config({"model": str(folder), **OPTIONS}, kv_cache_policy="randkv").model_config


@pytest.mark.parametrize(
    ("model_type", "reason"), [("granitemoehybrid", HYBRID), ("deepseek_v2", LATENT)], ids=("hybrid", "latent")
)
def test_every_facade_says_so_before_anything_is_loaded(
    family: Callable[..., Path], model_type: str, reason: str
) -> None:
    model = str(family(model_type))
    assert refused(lambda: AsyncLLM(model, **OPTIONS)) == [f"--model {model}: sessions: {reason}"]
    assert refused(lambda: LLM(model, kv_cache_policy="randkv", **OPTIONS)) == [
        f"--model {model}: kv_cache_policy: {reason}"
    ]
    arguments = (model, *FLAGS, "--enable-streaming", "--kv-cache-policy", "randkv")
    assert refused(lambda: server_config(*parsed(arguments, SERVE_FLAGS))) == [
        f"--model {model}: sessions and kv_cache_policy: {reason}"
    ]
    said = [list(verdict.reasons) for verdict in diagnose((model, *FLAGS)).verdicts]
    assert said == [[f"--model {model}: {feature}: {reason}"] for feature in ("sessions", "kv_cache_policy")]


PLAIN: dict[str, Any] = {
    "model": "m",
    "runner_type": "generate",
    "hf_text_config": SimpleNamespace(model_type="llama", rope_parameters={"rope_type": "default"}),
    "is_hybrid": False,
    "is_attention_free": False,
    "use_mla": False,
    "is_encoder_decoder": False,
    "is_diffusion": False,
    "get_sliding_window": lambda: None,
    "rswa_window": None,
    "attention_chunk_size": None,
    "uses_alibi": False,
    "uses_mrope": False,
    "uses_xdrope_dim": 0,
}


def text(**more: Any) -> dict[str, Any]:
    return {"hf_text_config": SimpleNamespace(**vars(PLAIN["hf_text_config"]), **more)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"is_diffusion": True}, "denoised"),
        ({"rswa_window": 7}, "a sliding window over what is generated, of 7"),
        (text(dual_chunk_attention_config={}), "dual chunk attention"),
        (text(layer_types=["full_attention", "other"]), "layers of several kinds (full_attention, other)"),
        ({"uses_mrope": True}, "multi-dimensional RoPE"),
        ({"uses_xdrope_dim": 3}, "multi-dimensional RoPE"),
    ],
)
def test_each_other_property_is_one_reason(changes: dict[str, Any], words: str) -> None:
    def config(**attributes: Any) -> Any:
        return SimpleNamespace(model_config=SimpleNamespace(**attributes))

    assert model_errors(config(**PLAIN), "sessions") == ()
    [reason] = model_errors(config(**PLAIN | changes), "sessions")
    assert reason.startswith("--model m: sessions: ")
    assert words in reason


def test_a_flag_that_vllm_has_set_for_the_model_is_no_reason(family: Callable[..., Path]) -> None:
    """Chunked prefill is turned off by vLLM itself: for latent attention on a CPU, and for most pooling models."""
    for model_type in ("deepseek_v2", "bert"):
        ours, _ = engine_args.session_engine_args({"model": str(family(model_type)), **OPTIONS})
        config = ours.create_engine_config()
        assert config.scheduler_config.enable_chunked_prefill is False
        assert config_errors(config) == compaction_errors(config) == ()


ATTENTION: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**ATTENTION)
STATE = MambaSpec(block_size=16, shapes=((2,),), dtypes=(torch.float32,), mamba_type=MambaAttentionBackendEnum.MAMBA2)


def cache_of(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


CONFIG: Any = SimpleNamespace(model_config=SimpleNamespace(model="m"))


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ((FULL, STATE), instead("layers with a state instead of attention")),
        ((STATE,), instead("layers with a state instead of attention")),
        ((SlidingWindowSpec(**ATTENTION, sliding_window=64),), instead("a sliding window of 64")),
        ((FULL, SlidingWindowSpec(**ATTENTION, sliding_window=64)), instead("a sliding window of 64")),
        ((FullAttentionSpec(**ATTENTION, sliding_window=64),), instead("a sliding window of 64")),
        ((BoundedAttentionSpec(**ATTENTION, sliding_window=64),), instead("a sliding window of 64")),
        ((ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=32),), instead("attention in chunks of 32")),
        ((FullAttentionSpec(**ATTENTION, attention_chunk_size=32),), instead("attention in chunks of 32")),
        ((FullAttentionSpec(**ATTENTION, non_causal=True),), instead("attention in both directions")),
        ((EncoderOnlyAttentionSpec(**ATTENTION),), instead("attention in both directions")),
        ((CrossAttentionSpec(**ATTENTION), FULL), instead("an encoder and a decoder")),
        ((MLAAttentionSpec(**ATTENTION),), instead("multi-head latent attention")),
        ((SlidingWindowMLASpec(**ATTENTION, sliding_window=64),), instead("multi-head latent attention")),
        ((SinkFullAttentionSpec(**ATTENTION, sink_len=4),), instead("sinks that are cache entries")),
        ((RSWASpec(**ATTENTION, rswa_window=8),), instead("a sliding window over what is generated")),
        ((HiddenStateCacheSpec(**ATTENTION),), instead("HiddenStateCacheSpec, which kvpolicy does not know")),
        ((FULL, FULL), "exactly 1 KV-cache group is needed, this model has 2"),
        ((), "exactly 1 KV-cache group is needed, this model has 0"),
        ((UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL}),), "KV heads of one number and size"),
    ],
)
def test_what_the_layers_ask_for_is_one_reason_that_names_it(specs: tuple[Any, ...], words: str) -> None:
    [reason] = layer_errors(CONFIG, cache_of(*specs), "kv_cache_policy")
    assert reason.startswith(f"--model m: kv_cache_policy: {words}")
    assert "Spec(" not in reason
    # A worker with a policy finds it first: it has the caches before there is a scheduler.
    assert refused(lambda: make_compactor([], cache_of(*specs), CONFIG)) == [reason]


def test_full_causal_attention_is_no_reason() -> None:
    assert layer_errors(CONFIG, cache_of(FULL), "sessions") == ()
    assert layer_errors(CONFIG, cache_of(BoundedAttentionSpec.bounding(FULL)), "kv_cache_policy") == ()


@pytest.mark.parametrize("policy", [None, "randkv"], ids=["sessions", "policy"])
def test_a_model_whose_configuration_hides_what_it_is_is_refused_by_its_layers(
    family: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, policy: str | None
) -> None:
    """The front end says nothing, as of a model that it cannot tell, nor does the loaded model: the caches do."""
    monkeypatch.setattr(engine_args, "start_errors", lambda *_: ())
    monkeypatch.setattr(runner_v1, "loaded_model_errors", lambda *_: ())
    small = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 64,
        "shared_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    }
    model = family("granitemoehybrid", **small)
    reasons = refused(
        lambda: SteppedEngine(
            model, kv_cache_policy=policy, load_format="dummy", skip_tokenizer_init=True, max_model_len=128
        )
    )
    named = "sessions" if policy is None else "kv_cache_policy"
    assert reasons == [
        f"--model {model}: {named}: "
        + instead("layers with a state instead of attention (Mamba, linear attention, convolutions)")
    ]

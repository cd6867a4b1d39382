"""Start-up guards: every reason at once, each naming the flag, before a model is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from kvpolicy.adapters.vllm import adapter_package
from kvpolicy.adapters.vllm.v0_28.engine_args import checked_config
from kvpolicy.adapters.vllm.v0_28.guards import cache_errors, compaction_errors, config_errors
from kvpolicy.adapters.vllm.v0_28.request_guards import RequestGuard
from kvpolicy.adapters.vllm.v0_28.surface import SURFACE, PrivateName, surface_errors
from kvpolicy.core.errors import PolicyUsageError, UnsupportedEngineError

if TYPE_CHECKING:
    from pathlib import Path


def options(model: Path, **more: object) -> dict[str, object]:
    return {"model": str(model), "max_model_len": 512, "max_num_batched_tokens": 512, "enforce_eager": True, **more}


def test_every_private_name_is_there_with_the_expected_signature() -> None:
    assert surface_errors() == ()
    assert len({(name.module, name.owner, name.name) for name in SURFACE}) == len(SURFACE)


def test_the_surface_check_notices_what_is_gone_and_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = "vllm.v1.core.sched.scheduler"
    wrong = (
        PrivateName(module=scheduler, owner="Scheduler", name="schedule", parameters=("self",)),
        PrivateName(module=scheduler, owner="Scheduler", name="nonsense", parameters=("self",)),
        PrivateName(module=scheduler, owner="Scheduler", name="nonsense"),
        PrivateName(module=scheduler, owner="Nobody", name="nonsense"),
    )
    monkeypatch.setattr("kvpolicy.adapters.vllm.v0_28.surface.SURFACE", wrong)
    errors = surface_errors()
    assert len(errors) == 4
    assert "throttle_prefills" in errors[0]
    assert all("gone" in error for error in errors[1:])


def test_only_known_versions_are_taken() -> None:
    assert adapter_package() == adapter_package("0.28.0") == "kvpolicy.adapters.vllm.v0_28"
    with pytest.raises(UnsupportedEngineError, match=r"expected one of 0\.28\.x, got '0\.29\.1'"):
        adapter_package("0.29.1")


def test_a_good_configuration_passes_with_our_classes_in_it(tiny_model: Path) -> None:
    config = checked_config(options(tiny_model), max_sessions=3)
    assert config.scheduler_config.scheduler_cls == "kvpolicy.adapters.vllm.v0_28.scheduler.SessionScheduler"
    assert config.parallel_config.worker_cls == "kvpolicy.adapters.vllm.v0_28.worker.PolicyCPUWorker"
    assert config.scheduler_config.async_scheduling is False
    assert config.additional_config["kvpolicy"] == {"max_sessions": 3}


GUARD = RequestGuard(num_token_ids=300, hidden_size=4)


def request_of(tokens: list[int] | None, params: SamplingParams | None = None, **more: Any) -> EngineCoreRequest:
    fields: dict[str, Any] = dict.fromkeys(EngineCoreRequest.__struct_fields__[:9])
    return EngineCoreRequest(
        **fields
        | {"request_id": "a", "arrival_time": 0.0, "prompt_token_ids": tokens, "sampling_params": params}
        | more
    )


def test_a_tokenizer_may_know_more_tokens_than_the_model() -> None:
    """Its end token included, which every request brings along."""
    params = SamplingParams(allowed_token_ids=[5, 300], logprob_token_ids=[299, 301], logit_bias={-1: 1.0})
    assert [error.split(",")[1] for error in GUARD.errors(request_of([5, 310], params))] == [
        " got 310",
        " got 300",
        " got -1",
        " got 301",
    ]
    params = SamplingParams(min_tokens=1)
    assert GUARD.errors(request_of([0, 299], params)) == ()
    params.update_from_generation_config({}, 300)
    assert "min_tokens" in GUARD.errors(request_of([0, 299], params))[0]
    params.min_tokens = 0
    assert GUARD.errors(request_of([0, 299], params)) == ()
    assert "token ids" in GUARD.token_errors("tokens", 5)[0]
    assert GUARD.token_errors("tokens", []) == ()


def test_ids_that_stand_where_embeddings_come_from_elsewhere_are_not_looked_up() -> None:
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=1, length=2))
    assert GUARD.errors(request_of([5, 400, 400, 6], mm_features=[image])) == ()
    assert "got 401" in GUARD.errors(request_of([5, 400, 400, 401], mm_features=[image]))[0]
    some = {"prompt_embeds": torch.zeros(3, 4), "prompt_is_token_ids": [True, False, True]}
    assert GUARD.errors(request_of([5, 400, 6], **some)) == ()
    assert "got 401" in GUARD.errors(request_of([5, 400, 401], **some))[0]
    assert "one value for each of 2 tokens" in GUARD.errors(request_of([5, 6], **some))[0]
    assert GUARD.errors(request_of(None, prompt_embeds=torch.zeros(3, 4))) == ()
    for embeds in (torch.zeros(3, 5), torch.zeros(3, 4).to_sparse()):
        assert "shape (tokens, 4)" in GUARD.errors(request_of(None, prompt_embeds=embeds))[0]


def test_the_bound_of_a_model_is_that_of_its_embedding() -> None:
    config: Any = SimpleNamespace(get_vocab_size=lambda: 300, get_hidden_size=lambda: 4)
    assert RequestGuard.of(config) == GUARD
    config.get_vocab_size = lambda: 0  # it has none
    assert RequestGuard.of(config).num_token_ids == 1 << 31


def test_our_own_arguments_cannot_be_overridden(tiny_model: Path) -> None:
    with pytest.raises(PolicyUsageError) as caught:
        checked_config(options(tiny_model, async_scheduling=True, scheduler_cls="mine", worker_cls="mine"))
    assert [reason.split(":")[0] for reason in caught.value.reasons] == [
        "scheduler_cls",
        "worker_cls",
        "async_scheduling",
    ]


def test_what_kvpolicy_sets_hides_no_other_reason(tiny_model: Path) -> None:
    wrong = options(tiny_model, async_scheduling=True, additional_config="x", max_num_seqs=1, kv_cache_dtype="fp8")
    with pytest.raises(PolicyUsageError) as caught:
        checked_config(wrong, kv_cache_policy={"type": {1, 2}})
    text = str(caught.value)
    for what in ("async_scheduling", "additional_config", "that JSON has", "--max-num-seqs", "--kv-cache-dtype fp8"):
        assert what in text
    with pytest.raises(PolicyUsageError, match=r"(?s)async_scheduling.*engine configuration"):
        checked_config({**wrong, "max_model_len": -5})


def test_all_reasons_come_at_once_and_name_the_flag(tiny_model: Path) -> None:
    with pytest.raises(PolicyUsageError) as caught:
        checked_config(
            options(tiny_model, max_num_seqs=1, prefix_match_unit=8, block_size=16, enable_chunked_prefill=False)
        )
    text = str(caught.value)
    for flag in ("--max-num-seqs", "--prefix-match-unit", "--no-enable-chunked-prefill"):
        assert flag in text


@pytest.mark.parametrize("max_sessions", [0, 256, "3", True])
def test_max_sessions_stays_below_the_slots(tiny_model: Path, max_sessions: Any) -> None:
    with pytest.raises(PolicyUsageError, match="max_sessions"):
        checked_config(options(tiny_model, max_num_seqs=8), max_sessions=max_sessions)


def test_an_unknown_option_is_named(tiny_model: Path) -> None:
    with pytest.raises(PolicyUsageError, match="unknown key 'max_session'; known keys: max_sessions"):
        checked_config(options(tiny_model, additional_config={"kvpolicy": {"max_session": 1}}))


class Changed:
    """A configuration with some values changed; everything else is the real one's."""

    def __init__(self, real: object, changes: dict[str, object]) -> None:
        self.real, self.changes = real, changes

    def __getattr__(self, name: str) -> object:
        nested = {key.split(".", 1)[1]: value for key, value in self.changes.items() if key.startswith(f"{name}.")}
        if nested:
            return Changed(getattr(self.real, name), nested)
        return self.changes[name] if name in self.changes else getattr(self.real, name)


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("scheduler_config.async_scheduling", True, "--async-scheduling"),
        ("use_v2_model_runner", True, "VLLM_USE_V2_MODEL_RUNNER"),
        ("parallel_config.pipeline_parallel_size", 2, "--pipeline-parallel-size 2"),
        ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size 2"),
        ("parallel_config.prefill_context_parallel_size", 2, "--prefill-context-parallel-size 2"),
        ("parallel_config.enable_dbo", True, "--enable-dbo"),
        ("speculative_config", object(), "--speculative-config"),
        ("kv_transfer_config", object(), "--kv-transfer-config"),
        ("ec_transfer_config", object(), "--ec-transfer-config"),
        ("kv_events_config", SimpleNamespace(enable_kv_cache_events=True), "--kv-events-config"),
        ("cache_config.kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
        ("cache_config.prefix_match_unit", 8, "--prefix-match-unit"),
        ("model_config.enable_return_routed_experts", True, "--enable-return-routed-experts"),
        ("scheduler_config.enable_chunked_prefill", False, "--no-enable-chunked-prefill"),
        ("scheduler_config.max_num_seqs", 1, "--max-num-seqs 1"),
        ("model_config.disable_cascade_attn", False, "--disable-cascade-attn"),
        ("model_config.uses_mrope", True, "--model"),
        ("model_config.hf_text_config", SimpleNamespace(rope_parameters=None), "rotary"),
    ],
)
def test_each_guard(tiny_model: Path, name: str, value: object, flag: str) -> None:
    config = checked_config(options(tiny_model))
    errors = config_errors(Changed(config, {name: value}))
    assert len(errors) == 1
    assert flag in errors[0]


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("parallel_config.data_parallel_size", 2, "--data-parallel-size 2"),
        ("scheduler_config.enable_chunked_prefill", False, "--no-enable-chunked-prefill"),
        ("scheduler_config.scheduler_reserve_full_isl", False, "--no-scheduler-reserve-full-isl"),
        ("cache_config.cache_dtype", "fp8", "--kv-cache-dtype fp8"),
    ],
)
def test_each_guard_of_policies_alone(tiny_model: Path, name: str, value: object, flag: str) -> None:
    config = checked_config(options(tiny_model))
    errors = compaction_errors(Changed(config, {name: value}))
    assert len(errors) == 1
    assert flag in errors[0]


def test_the_cache_must_be_full_attention_in_one_group(tiny_model: Path) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    config = checked_config(options(tiny_model))
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    sliding = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64)

    def errors(*specs: object, hash_block_size: int = 16) -> tuple[str, ...]:
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        return cache_errors(config, SimpleNamespace(kv_cache_groups=groups), hash_block_size, 16, "sessions")

    assert errors(full) == ()
    assert "exactly 1 KV-cache group" in errors(full, full)[0]
    assert "full causal attention" in errors(sliding)[0]
    assert "--prefix-match-unit" in errors(full, hash_block_size=8)[0]

"""``kvpolicy doctor`` on the real engine's configurations; no engine is started."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from kvpolicy.adapters.vllm.v0_28.server import doctor
from kvpolicy.core.errors import EngineContractError
from kvpolicy.serving import diagnose
from tests.integration.server_process import COMMAND

if TYPE_CHECKING:
    from pathlib import Path

    from kvpolicy.adapters.vllm.shared.diagnosis import Diagnosis

USUAL = ("--max-model-len", "512")


def reasons(diagnosis: Diagnosis) -> tuple[str, str]:
    sessions, policies = ("\n".join(verdict.reasons) for verdict in diagnosis.verdicts)
    return sessions, policies


def changed(model: Path, folder: Path, **changes: Any) -> str:
    """Return a copy of a model's configuration (no weights) that says something else."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    return str(folder)


def test_the_command_says_what_works(tiny_model: Path) -> None:
    done = subprocess.run(  # noqa: S603 - ours
        [*COMMAND, "doctor", str(tiny_model), *USUAL, "--max-num-seqs", "1", "--kv-cache-policy", "randkv"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "COLUMNS": "150"},
    )
    # Sessions would not work, but it is the policy that was asked for.
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("0.28.0", "cpu", "LlamaForCausalLM", "CPU_ATTN", "V1", "verified", "--max-num-seqs 1"):
        assert part in done.stdout
    assert "Traceback" not in done.stderr


def test_without_a_model_the_engine_alone_is_looked_at() -> None:
    diagnosis = diagnose(())
    assert diagnosis.is_good
    assert reasons(diagnosis) == ("", "")
    assert "none given" in {fact.name: fact.found for fact in diagnosis.facts}["model"]


def test_a_missing_compiler_is_a_reason_and_can_be_made_unneeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one the engine dies of the first random sample, in eager mode as well."""
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    compiler = tmp_path / "our-c++"
    monkeypatch.setenv("CXX", str(compiler))
    diagnosis = diagnose(("--enable-streaming",))
    assert not diagnosis.is_good
    for text in reasons(diagnosis):
        assert all(part in text for part in (f"expected {compiler}", "CXX", "TORCH_COMPILE_DISABLE=1"))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert reasons(diagnose(())) == ("", "")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    compiler.write_text("#!/bin/sh\n", encoding="utf-8")
    compiler.chmod(0o755)
    diagnosis = diagnose(())
    assert reasons(diagnosis) == ("", "")
    assert {fact.name: fact.found for fact in diagnosis.facts}["C++ compiler"] == str(compiler)


@pytest.mark.parametrize("num_stages", ["1", "2"])
def test_the_layers_of_a_model_are_those_of_all_stages(tiny_model: Path, num_stages: str) -> None:
    diagnosis = diagnose((str(tiny_model), *USUAL, "--pipeline-parallel-size", num_stages))
    assert "; 2 layers, " in {fact.name: fact.found for fact in diagnosis.facts}["model"]


def test_what_is_not_installed_is_a_reason_against_sessions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    sessions, policies = reasons(diagnose(()))
    assert "kvpolicy[server]" in sessions
    assert policies == ""


def test_every_reason_comes_at_once_and_to_whom_it_belongs(tiny_model: Path) -> None:
    flags = "--max-num-seqs 1 --api-server-count 2 --enable-streaming --max-sessions 5 --kv-cache-policy nonsense"
    diagnosis = diagnose((str(tiny_model), *USUAL, *flags.split(), "--kv-cache-dtype", "fp8"))
    sessions, policies = reasons(diagnosis)
    assert not diagnosis.is_good
    assert all(part in sessions for part in ("--max-num-seqs 1", "--api-server-count 2", "--max-sessions"))
    assert all(part in policies for part in ("nonsense", "--api-server-count 2", "--kv-cache-dtype fp8"))
    assert "nonsense" not in sessions
    assert "--max-sessions" not in policies


def test_a_wrong_flag_of_ours_hides_nothing_else(tiny_model: Path) -> None:
    flags = "--session-idle-timeout-s 0 --max-num-seqs 1 --enable-streaming"
    sessions, policies = reasons(diagnose((str(tiny_model), *USUAL, *flags.split())))
    assert "--session-idle-timeout-s" in policies
    assert all(part in sessions for part in ("--session-idle-timeout-s", "--max-num-seqs 1"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}, "sliding window"),
        ({"architectures": ["NoSuchModel"]}, "engine configuration"),
    ],
    ids=["sliding window", "unknown architecture"],
)
def test_models_that_cannot_be(tiny_model: Path, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    diagnosis = diagnose((changed(tiny_model, tmp_path / "model", **changes), *USUAL))
    assert not diagnosis.is_good
    assert all(reason in text for text in reasons(diagnosis)), diagnosis


def test_a_layout_that_is_not_understood_is_a_reason_against_policies_only(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise EngineContractError("expected one packing, got another")

    monkeypatch.setattr("kvpolicy.adapters.vllm.v0_28.worker.layout_probe.probe_cpu_layout", refuse)
    assert diagnose((str(tiny_model), *USUAL, "--enable-streaming")).is_good
    diagnosis = diagnose((str(tiny_model), *USUAL))
    assert not diagnosis.is_good
    assert reasons(diagnosis) == ("", "expected one packing, got another")

"""What this vLLM, its platform and a model support, found out from configurations and a tiny tensor only."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import vllm
from attrs import define, field
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from kvpolicy.adapters.vllm.shared.diagnosis import Diagnosis, Fact, Verdict
from kvpolicy.adapters.vllm.shared.options import EngineOptions, policy_errors
from kvpolicy.adapters.vllm.shared.serve_options import as_typed
from kvpolicy.adapters.vllm.v0_28.server.process import configuration, parsed
from kvpolicy.adapters.vllm.v0_28.server.server_guards import media_errors, process_errors, session_errors
from kvpolicy.adapters.vllm.v0_28.startup.guards import POLICIES, SESSIONS, start_errors
from kvpolicy.adapters.vllm.v0_28.startup.model_guards import model_errors
from kvpolicy.adapters.vllm.v0_28.startup.position_limit import position_errors, position_limit
from kvpolicy.adapters.vllm.v0_28.startup.surface import SURFACE, surface_errors
from kvpolicy.core.errors import EngineContractError, MissingExtraError, PolicyUsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from vllm.config import VllmConfig

    from kvpolicy.adapters.vllm.shared.serve_options import ServeFlags, ServeOptions

_FOR_SESSIONS = ("fastapi", "pydantic", "PIL")
# What is probed where no model says anything else: vLLM's block size on a CPU, and common values.
_BLOCK_SIZE, _HEAD_SIZE, _DTYPE = 128, 64, torch.bfloat16


@define
class _Findings:
    """What has been found so far."""

    facts: list[Fact] = field(factory=list)
    sessions: list[str] = field(factory=list)
    policies: list[str] = field(factory=list)

    def both(self, *reasons: str) -> None:
        """Add reasons against sessions and policies alike."""
        self.sessions += reasons
        self.policies += reasons


def diagnose(arguments: Sequence[str], flags: ServeFlags) -> Diagnosis:
    """Return what works here, for a server with these arguments (of ``kvpolicy serve``; the model may be missing).

    What is asked for is what the arguments turn on: sessions, a policy; both, if they turn on neither.

    Raises:
        SystemExit: by vLLM's parser: there is no such flag.
    """
    args, options, reasons = parsed(arguments, flags, prog="kvpolicy doctor")
    found = _Findings()
    found.both(*reasons)
    _look_at_engine(found)
    _look_at_compiler(found)
    config = _look_at_configuration(found, args, options)
    _look_at_layout(found, config)
    found.both(*process_errors(args))
    found.sessions += session_errors(args)
    found.sessions += [
        str(MissingExtraError(extra="server", module=module)) for module in _FOR_SESSIONS if find_spec(module) is None
    ]
    policy = options.kv_cache_policy
    return Diagnosis(
        facts=tuple(found.facts),
        verdicts=(
            Verdict(
                name="A: bounded sessions (--enable-streaming)",
                is_asked_for=options.enable_streaming or options.is_stock,
                reasons=tuple(dict.fromkeys(map(as_typed, found.sessions))),
            ),
            Verdict(
                name=f"B: policies (--kv-cache-policy {policy or 'NAME'})",
                is_asked_for=policy is not None or options.is_stock,
                reasons=tuple(dict.fromkeys(map(as_typed, found.policies))),
            ),
        ),
    )


def _look_at_engine(found: _Findings) -> None:
    errors = surface_errors()
    found.both(*errors)
    found.facts += [
        Fact("vLLM", f"{vllm.__version__}, adapter {__name__.rpartition('.')[0]}"),
        Fact("platform", f"{current_platform.device_type}, torch {torch.__version__}"),
        Fact(
            "private names of vLLM",
            f"{len(SURFACE) - len(errors)} of {len(SURFACE)} are as this adapter needs them",
            not errors,
        ),
    ]


def _look_at_compiler(found: _Findings) -> None:
    """Note whether random samples can be taken: on a CPU vLLM compiles the code for it, in eager mode, too."""
    if not current_platform.is_cpu():
        return
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        found.facts.append(Fact("C++ compiler", "not needed: TORCH_COMPILE_DISABLE=1"))
        return
    # The one that torch looks for.
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    path = shutil.which(name)
    found.facts.append(Fact("C++ compiler", path or f"{name}: not found", path is not None))
    if path is None:
        found.both(
            f"C++ compiler: expected {name} (CXX names another), found none; without it the engine dies of the first "
            "reply with a temperature above 0; install one, or set TORCH_COMPILE_DISABLE=1, which makes it unneeded"
        )


def _look_at_configuration(found: _Findings, args: Namespace, options: ServeOptions) -> VllmConfig | None:
    """Note what an engine configuration says; return it, or None where there is none."""
    found.policies += policy_errors(options.kv_cache_policy)
    if args.model_tag is None and args.model == AsyncEngineArgs.model:
        found.facts.append(Fact("model", "none given; name one to have it checked"))
        return None
    config, reasons = configuration(args, options)
    found.both(*reasons)
    if config is None:
        found.facts.append(Fact("engine configuration", "there can be none", is_good=False))
        return None
    try:
        EngineOptions.from_config(config)
    except PolicyUsageError as error:
        for reason in error.reasons:
            (found.sessions if reason.startswith("max_sessions") else found.policies).append(reason)
    found.sessions += start_errors(config, (SESSIONS,))
    found.policies += start_errors(config, (POLICIES,))
    found.both(*media_errors(config))
    found.facts += _configuration_facts(config)
    return config


def _configuration_facts(config: VllmConfig) -> Iterator[Fact]:
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    yield Fact(
        "model",
        f"{model.model}: {', '.join(model.architectures)}; {model.get_total_num_hidden_layers()} layers, "
        f"{model.get_total_num_kv_heads()} KV heads of {model.get_head_size()}, "
        f"{str(model.dtype).removeprefix('torch.')}",
    )
    knows_range = not position_errors(config)
    yield Fact(
        "lengths",
        f"trained range {position_limit(config) if knows_range else 'unknown'}, context limit {model.max_model_len}, "
        f"blocks of {cache.block_size}",
        knows_range,
    )
    yield Fact("model runner", "V2" if config.use_v2_model_runner else "V1", not config.use_v2_model_runner)
    backend = config.attention_config.backend
    unset = "CPU_ATTN" if current_platform.is_cpu() else "chosen when the engine starts"
    yield Fact("attention backend", unset if backend is None else backend.name)
    yield Fact(
        "scheduling",
        f"at most {scheduler.max_num_seqs} requests, {scheduler.max_num_batched_tokens} tokens a step; "
        f"async scheduling {'on' if scheduler.async_scheduling else 'off'}, "
        f"chunked prefill {'on' if scheduler.enable_chunked_prefill else 'off'}",
    )
    # A session takes text for now, whatever its model takes.
    yield Fact("images in sessions", "no")


def _look_at_layout(found: _Findings, config: VllmConfig | None) -> None:
    """Note how the KV cache is laid out: policies move its cells.

    Not where the model is refused for what it is: its cache may be of another kind, and what is said of it is enough.
    """
    if config is not None and model_errors(config, POLICIES):
        return
    if not current_platform.is_cpu():
        found.facts.append(Fact("KV layout", "strided; compared with the cache itself when the engine starts"))
        return
    from kvpolicy.adapters.vllm.v0_28.worker.layout_probe import probe_cpu_layout

    dtype, block_size, head_size = _DTYPE, _BLOCK_SIZE, _HEAD_SIZE
    if config is not None:
        dtype, head_size = config.model_config.dtype, config.model_config.get_head_size()
        block_size = config.cache_config.block_size
    what = f"{str(dtype).removeprefix('torch.')}, blocks of {block_size}, heads of {head_size}"
    try:
        probe_cpu_layout(dtype=dtype, block_size=block_size, head_size=head_size)
    except EngineContractError as error:
        found.policies.append(str(error))
        found.facts.append(Fact("KV layout", f"{what}: not understood", is_good=False))
    else:
        found.facts.append(Fact("KV layout", f"{what}: found out by writing, and verified"))

"""Which servers sessions and policies refuse, beyond what their engine refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm import envs

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from vllm.config import VllmConfig

# What the chat route takes from a generation configuration; see vLLM's ``ModelConfig.get_diff_sampling_param``.
_SAMPLING_DEFAULTS = frozenset({"repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens"})
_OWN_DEFAULTS = "sessions would not follow it, they have defaults of their own (--session-temperature and others)"


def process_errors(args: Namespace) -> Iterator[str]:
    """Yield why sessions and policies cannot run in the processes that the flags ask for."""
    if args.api_server_count not in (None, 1):
        yield (
            f"--api-server-count {args.api_server_count}: must be 1 (a session lives in the process that opened it; "
            "start several servers behind a router instead)"
        )
    if args.headless:
        yield "--headless: not supported (the server and its engine belong together)"
    if args.grpc:
        yield "--grpc: not supported (sessions and policies are served over HTTP)"
    if args.data_parallel_multi_port_external_lb:
        yield "--data-parallel-multi-port-external-lb: not supported; start one server for each port"
    if envs.VLLM_USE_RUST_FRONTEND:
        yield "VLLM_USE_RUST_FRONTEND: not supported; unset it"


def session_errors(args: Namespace) -> Iterator[str]:
    """Yield why a server with these flags can have no sessions, beyond what its processes and its engine refuse."""
    if args.skip_tokenizer_init:
        yield "--skip-tokenizer-init: not supported with sessions over HTTP (their chunks and replies are text)"
    yield from _chat_errors(args)


def _chat_errors(args: Namespace) -> Iterator[str]:
    """Yield which flags shape replies of the chat route, or what they have by default, and would not shape sessions'.

    Those that shape prompts work in sessions, or have nothing there to work on: see docs/reference/chat-templates.md.
    """
    parser = args.reasoning_parser or args.structured_outputs_config.reasoning_parser
    if parser:
        yield f"--reasoning-parser {parser}: not supported (a session's reply has its thoughts in it)"
    if args.reasoning_config is not None:
        yield "--reasoning-config: not supported (a session's reply has its thoughts in it)"
    if args.tokens_only:
        yield "--tokens-only: not supported (sessions take text)"
    given = sorted(_SAMPLING_DEFAULTS & args.override_generation_config.keys())
    if given:
        yield f"--override-generation-config {', '.join(given)}: {_OWN_DEFAULTS}; leave it out"
    if args.generation_config not in ("auto", "vllm"):
        # Its end-of-sequence tokens would work; one flag for half of a file is not what anybody means.
        yield f"--generation-config {args.generation_config}: {_OWN_DEFAULTS}; leave it out"


def media_errors(config: VllmConfig) -> Iterator[str]:
    """Yield why a model's images cannot be served as the engine takes them."""
    model = config.model_config
    cache_gb = model.multimodal_config.mm_processor_cache_gb if model.is_multimodal_model else 0
    if cache_gb:
        yield f"--mm-processor-cache-gb {cache_gb}: must be 0 (what it has seen before comes without its data)"

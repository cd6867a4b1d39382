"""Which servers sessions and policies refuse, beyond what their engine refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm import envs

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from vllm.config import VllmConfig


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


def media_errors(config: VllmConfig) -> Iterator[str]:
    """Yield why a model's images cannot be served as the engine takes them."""
    model = config.model_config
    cache_gb = model.multimodal_config.mm_processor_cache_gb if model.is_multimodal_model else 0
    if cache_gb:
        yield f"--mm-processor-cache-gb {cache_gb}: must be 0 (what it has seen before comes without its data)"

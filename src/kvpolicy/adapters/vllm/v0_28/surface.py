"""Every name of vLLM 0.28 that this adapter subclasses, calls or reads without a public promise.

Upgrading to another engine version starts here: ``surface_errors()`` says what has changed. A name listed with
parameters must have exactly those; one listed without is an attribute that ``__init__`` (or the class body) must set.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator


@frozen(kw_only=True)
class PrivateName:
    """One name: where it lives (no owner: in the module), and the parameters it must have (None: an attribute)."""

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...] | None = None


def _methods(module: str, owner: str, **signatures: str) -> Iterator[PrivateName]:
    for name, signature in signatures.items():
        yield PrivateName(module=module, owner=owner, name=name, parameters=tuple(signature.split()))


def _attributes(module: str, owner: str, names: str) -> Iterator[PrivateName]:
    for name in names.split():
        yield PrivateName(module=module, owner=owner, name=name)


SURFACE: tuple[PrivateName, ...] = (
    # Scheduler: hooks that we override.
    *_methods(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        add_request="self request",
        schedule="self throttle_prefills",
        update_from_output="self scheduler_output model_runner_output",
        finish_requests="self request_ids finished_status",
        reset_prefix_cache="self reset_running_requests reset_connector",
        has_finished_requests="self",
        _update_after_schedule="self scheduler_output",
        _update_request_with_output="self request new_token_ids is_stale",
        _handle_stopped_request="self request",
        _preempt_request="self request timestamp drop_stale_output",
        _free_request="self request delay_free_blocks",
        _reserve_prefill_lookahead="self request num_computed_tokens num_new_tokens",
        _get_local_prefix_cache_hit="self request",
        _enqueue_waiting_request="self request",
    ),
    *_attributes(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        "requests running waiting skipped_waiting num_waiting_for_streaming_input finished_req_ids kv_cache_manager "
        "kv_cache_config vllm_config policy block_size hash_block_size max_model_len max_num_running_reqs "
        "finished_req_ids_dict grammar_compile_error_reqs",
    ),
    # Request and its per-token arrays.
    *_attributes(
        "vllm.v1.request",
        "Request",
        "_all_token_ids _output_token_ids prompt_token_ids num_prompt_tokens num_computed_tokens num_in_flight_tokens "
        "block_hashes cache_salt sampling_params max_tokens arrival_time stop_reason prefill_stats resumable "
        "streaming_queue client_index priority status num_preemptions structured_output_request use_structured_output "
        "prompt_embeds prompt_is_token_ids mm_features",
    ),
    *_methods("vllm.v1.request", "Request", update_block_hashes="self"),
    *_attributes("vllm.v1.request", "StreamingUpdate", "prompt_token_ids max_tokens arrival_time sampling_params"),
    *_methods("vllm.v1.request", "StreamingUpdate", from_request="request"),
    *_attributes("vllm.v1.structured_output.request", "StructuredOutputRequest", "grammar"),
    # KV-cache manager, its single table, and the block pool.
    *_attributes(
        "vllm.v1.core.kv_cache_manager", "KVCacheManager", "coordinator block_pool enable_caching watermark_blocks"
    ),
    *_methods(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        free="self request",
        truncate_computed_blocks="self blocks num_computed_tokens",
    ),
    *_attributes("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", "blocks"),
    *_attributes("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator", "single_type_managers"),
    *_attributes(
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager",
        "req_to_blocks num_cached_block block_size",
    ),
    *_methods(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager",
        get_num_blocks_to_allocate="self request_id num_tokens new_computed_blocks total_computed_tokens "
        "num_local_computed_tokens num_tokens_main_model apply_admission_cap",
        allocate_new_blocks="self request_id num_tokens num_tokens_main_model",
        cache_blocks="self request num_tokens retention_interval",
        get_num_common_prefix_blocks="self running_request_id",
    ),
    *_methods("vllm.v1.kv_cache_interface", "FullAttentionSpec", max_memory_usage_bytes="self vllm_config"),
    *_methods(
        "vllm.v1.kv_cache_spec_registry",
        "KVCacheSpecRegistry",
        register="kvcache_spec_cls manager_class uniform_type_base_spec",
    ),
    *_methods(
        "vllm.v1.core.block_pool",
        "BlockPool",
        get_new_blocks="self num_blocks",
        evict_blocks="self block_ids",
        free_blocks="self ordered_blocks",
        get_num_free_blocks="self",
    ),
    *_attributes("vllm.v1.core.block_pool", "BlockPool", "num_gpu_blocks"),
    *_attributes("vllm.v1.core.kv_cache_utils", "KVCacheBlock", "block_id ref_cnt is_null block_hash"),
    *_methods("vllm.v1.core.sched.request_queue", "RequestQueue", remove_requests="self requests"),
    *_methods(
        "vllm.v1.metrics.stats",
        "PrefillStats",
        set="self num_prompt_tokens num_local_cached_tokens num_external_cached_tokens",
    ),
    # Worker and runner.
    *_methods(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        _prepare_inputs="self scheduler_output num_scheduled_tokens",
        _update_states="self scheduler_output",
        get_kv_cache_spec="self",
        initialize_kv_cache="self kv_cache_config is_profiling",
        sample_tokens="self grammar_output",
        _update_streaming_request="self req_id new_req_data",
        _sample="self logits spec_decode_metadata",
        _bookkeeping_sync="self scheduler_output sampler_output logits hidden_states num_scheduled_tokens",
    ),
    *_attributes(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        "positions req_indices input_batch requests seq_lens optimistic_seq_lens_cpu query_start_loc kv_caches "
        "discard_request_mask",
    ),
    *_attributes(
        "vllm.v1.worker.gpu_input_batch", "InputBatch", "num_reqs req_ids req_id_to_index block_table generators"
    ),
    *_attributes("vllm.v1.worker.gpu_input_batch", "CachedRequestState", "block_ids generator"),
    *_methods(
        "vllm.v1.worker.block_table",
        "MultiGroupBlockTable",
        clear_row="self row_idx",
        add_row="self block_ids row_idx",
        compute_slot_mapping="self num_reqs query_start_loc positions",
    ),
    # How the CPU backend lays its cache out is learned by writing to it.
    *_methods(
        "vllm._custom_ops",
        "",
        cpu_attn_reshape_and_cache="key value key_cache value_cache slot_mapping isa k_scale v_scale kv_cache_dtype",
    ),
    *_methods("vllm.v1.attention.backends.cpu_attn", "", _get_attn_isa="dtype block_size head_size kv_cache_dtype"),
    *_methods(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackend",
        get_kv_cache_shape="num_blocks block_size num_kv_heads head_size cache_dtype_str",
    ),
    *_methods("vllm.v1.worker.cpu_worker", "CPUWorker", init_device="self"),
    *_methods("vllm.v1.worker.gpu_worker", "Worker", init_device="self"),
    # Front end.
    *_methods(
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        add_request="self request_id prompt params arrival_time lora_request tokenization_kwargs trace_headers "
        "priority data_parallel_rank session_id prompt_text reasoning_ended reasoning_parser_kwargs",
        abort="self request_id internal",
        get_supported_tasks="self",
        _add_request="self request prompt parent_req index queue",
        _add_streaming_input_request="self request_id input_stream sampling_params arrival_time lora_request "
        "tokenization_kwargs trace_headers priority data_parallel_rank session_id",
        _run_output_handler="self",
        shutdown="self timeout",
    ),
    *_attributes("vllm.v1.engine.async_llm", "AsyncLLM", "output_processor renderer log_stats input_processor errored"),
    *_methods(
        "vllm.v1.engine.input_processor",
        "InputProcessor",
        process_inputs="self request_id prompt params supported_tasks arrival_time lora_request tokenization_kwargs "
        "trace_headers priority data_parallel_rank resumable session_id",
    ),
    *_methods("vllm.v1.serial_utils", "MsgpackEncoder", encode="self obj"),
    *_methods("vllm.v1.serial_utils", "MsgpackDecoder", decode="self bufs"),
    # Which data-parallel engine has a session.
    *_attributes("vllm.v1.engine.core_client", "DPLBAsyncMPClient", "reqs_in_flight engine_inflight core_engines"),
    *_attributes("vllm.v1.metrics.loggers", "StatLoggerManager", "stat_loggers"),
    *_methods("vllm.v1.core.single_type_kv_cache_manager", "", register_all_kvcache_specs="vllm_config"),
    *_attributes("vllm.v1.kv_cache_interface", "KVCacheSpec", "page_size_bytes block_size"),
    *_attributes(
        "vllm.v1.engine.llm_engine", "LLMEngine", "output_processor renderer log_stats logger_manager vllm_config"
    ),
    *_methods(
        "vllm.entrypoints.llm",
        "LLM",
        _render_and_add_requests="self prompts params lora_requests priorities",
    ),
    *_methods(
        "vllm.v1.engine.output_processor",
        "OutputProcessor",
        add_request="self request prompt parent_req request_index queue",
        process_outputs="self engine_core_outputs engine_core_timestamp iteration_stats",
        _update_streaming_request_state="self req_state request prompt",
        propagate_error="self e",
    ),
    *_attributes(
        "vllm.v1.engine.output_processor",
        "OutputProcessor",
        "request_states external_req_ids tokenizer stream_interval",
    ),
    *_methods(
        "vllm.v1.engine.output_processor",
        "RequestOutputCollector",
        put="self output",
        get="self",
        get_nowait="self",
        close="self",
    ),
    *_attributes(
        "vllm.v1.engine.output_processor",
        "RequestOutputCollector",
        "aggregate request_id output ready _input_stream_task",
    ),
    *_methods(
        "vllm.v1.engine.output_processor",
        "RequestState",
        apply_streaming_update="self update",
        _new_completion_output="self token_ids finish_reason stop_reason",
        from_new_request="tokenizer request prompt parent_req request_index queue log_stats stream_interval",
    ),
    *_attributes("vllm.v1.engine.output_processor", "RequestState", "streaming_input input_chunk_queue queue"),
    # The server: the steps from its parser to its HTTP loop.
    *_methods("vllm.entrypoints.openai.cli_args", "", make_arg_parser="parser", validate_parsed_serve_args="args"),
    *_methods("vllm.entrypoints.serve.utils.api_utils", "", cli_env_setup=""),
    *_methods("vllm.entrypoints.serve.utils.server_utils", "", get_uvicorn_log_config="args"),
    *_methods("vllm.entrypoints.cli.serve", "ServeSubcommand", cmd="args"),
    *_methods(
        "vllm.entrypoints.openai.api_server",
        "",
        setup_server="args reuse_port",
        build_app="args supported_tasks model_config",
        init_app_state="engine_client state args supported_tasks",
    ),
    *_methods("vllm.entrypoints.launcher", "", serve_http="app sock enable_ssl_refresh uvicorn_kwargs"),
    *_methods(
        "vllm.plugins.endpoint_plugins.interface",
        "EndpointPlugin",
        attach_router="self app",
        init_state="self engine_client state args",
    ),
)


def surface_errors() -> tuple[str, ...]:
    """Return what differs between this list and the installed engine; empty if nothing does."""
    return tuple(error for name in SURFACE if (error := _error_of(name)))


def _error_of(name: PrivateName) -> str | None:
    module = importlib.import_module(name.module)
    owner: Any = getattr(module, name.owner, None) if name.owner else module
    where = ".".join(filter(None, (name.module, name.owner, name.name)))
    if owner is None:
        return f"{name.module}.{name.owner}: expected a class, it is gone"
    if name.parameters is None:
        return None if _has_attribute(owner, name.name) else f"{where}: expected an attribute, it is gone"
    function = getattr(owner, name.name, None)
    if function is None:
        return f"{where}: expected a method, it is gone"
    parameters = tuple(inspect.signature(function).parameters)
    return None if parameters == name.parameters else f"{where}: expected {name.parameters}, got {parameters}"


def _has_attribute(owner: type, name: str) -> bool:
    """Whether a class defines an attribute, or one of its classes assigns ``self.<name>`` in ``__init__``."""
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", {}):
        return True
    return any(_assigns(base, name) for base in owner.__mro__ if "__init__" in vars(base) and base is not object)


def _assigns(owner: type, name: str) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner.__init__)))  # type: ignore[misc]
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
        for node in ast.walk(tree)
    )

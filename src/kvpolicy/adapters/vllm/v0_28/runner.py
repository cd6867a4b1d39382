"""Model runners that compact and shift. No arithmetic here: see compactor, kernels.kv_shift and kernels.rope_shift."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvpolicy.adapters.vllm.v0_28.kv_spec import BoundedAttentionSpec
from kvpolicy.adapters.vllm.v0_28.layouts import make_compactor
from kvpolicy.adapters.vllm.v0_28.options import EngineOptions
from kvpolicy.adapters.vllm.v0_28.wire import INTERNAL_KEY, StepDirective
from kvpolicy.kernels.generators import not_advanced, seeded_generator, without_rows
from kvpolicy.kernels.kv_shift import kv_indices, lower_lengths
from kvpolicy.kernels.rope_shift import add_row_shift, shift_by_row

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    from kvpolicy.adapters.vllm.v0_28.compactor import Compactor


class PolicyRunnerMixin:
    """Sessions and policies for any V1 model runner."""

    vllm_config: VllmConfig
    positions: Any
    seq_lens: Any
    optimistic_seq_lens_cpu: Any
    query_start_loc: Any
    req_indices: Any
    requests: Any
    input_batch: Any
    kv_caches: Any
    device: Any
    compactor: Compactor | None = None

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return each layer's spec; full attention is bounded where the engine was started for policies."""
        specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc] # the runner it is mixed into has it
        if not EngineOptions.from_config(self.vllm_config).compacts:
            return specs
        return {
            name: BoundedAttentionSpec.bounding(spec) if type(spec) is FullAttentionSpec else spec
            for name, spec in specs.items()
        }

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Make the KV caches, and learn how they are laid out where that is needed."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc] # likewise
        if EngineOptions.from_config(self.vllm_config).compacts:
            self.compactor = make_compactor(self.kv_caches, kv_cache_config, self.vllm_config)

    def _update_streaming_request(self, req_id: str, new_req_data: NewRequestData) -> CachedRequestState:
        """Take over a session's chunk, its random generator included (the stock runner keeps the first chunk's)."""
        state = super()._update_streaming_request(req_id, new_req_data)  # type: ignore[misc] # likewise
        state.generator = seeded_generator(new_req_data.sampling_params.seed, self.device)
        return state

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Compact first: blocks that were freed may be zeroed, copied to or written in this very step."""
        compactions = StepDirective.of(scheduler_output).compactions
        if compactions and self.compactor is not None:
            tables = [self.requests[compaction.request_id].block_ids[0] for compaction in compactions]
            after = self.compactor.apply(compactions, tables)
            for compaction, table in zip(compactions, after, strict=True):
                self._replace_table(compaction.request_id, table)
        return super()._update_states(scheduler_output)  # type: ignore[misc] # likewise

    def _replace_table(self, request_id: str, table: list[int]) -> None:
        # A new list: in one process the scheduler may hold the old one.
        self.requests[request_id].block_ids = (table,)
        row = self.input_batch.req_id_to_index.get(request_id)
        if row is not None:
            self.input_batch.block_table.clear_row(row)
            self.input_batch.block_table.add_row((table,), row)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, *args, **kwargs)  # type: ignore[misc] # likewise
        directive = StepDirective.of(scheduler_output)
        tokens = slice(scheduler_output.total_num_scheduled_tokens)
        if directive.kv_shifts:
            self._use_physical_lengths(directive, tokens)
        if directive.rope_shifts:
            # After the slots: they follow the index, the rotation follows the position.
            row_shift = shift_by_row(self.input_batch.req_ids, directive.rope_shifts, self.positions.device)
            add_row_shift(self.positions[tokens], self.req_indices.gpu[tokens], row_shift)
        return prepared

    def _use_physical_lengths(self, directive: StepDirective, tokens: slice) -> None:
        """Let attention and slots see what is held; positions, sampling and stop conditions stay logical."""
        rows = slice(self.input_batch.num_reqs)
        row_shift = shift_by_row(self.input_batch.req_ids, directive.kv_shifts, self.positions.device)
        lower_lengths(self.seq_lens[rows], row_shift)
        lower_lengths(self.optimistic_seq_lens_cpu[rows], row_shift)
        self.input_batch.block_table.compute_slot_mapping(
            self.input_batch.num_reqs,
            self.query_start_loc.gpu[: self.input_batch.num_reqs + 1],
            kv_indices(self.positions[tokens], self.req_indices.gpu[tokens], row_shift),
        )

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and report what was compacted in this step."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc] # likewise
        work = self.compactor.take_work() if self.compactor is not None else None
        if work is not None:
            setattr(output, INTERNAL_KEY, work)
        return output


class PolicyCPUModelRunner(PolicyRunnerMixin, CPUModelRunner):
    """The CPU runner with sessions and policies.

    A token is sampled for every row, also in the middle of a prefill, where nobody wants it. The stock runner takes
    such a sample back from a row's random generator by an offset, which generators of the CPU do not have: it raises.
    """

    discard_request_mask: Any

    def _discarded(self) -> dict[int, Any]:
        """Return the random generators, by row, of this step's rows whose sample is thrown away."""
        rows = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        generators = self.input_batch.generators
        return {row: generators[row] for row in rows if row in generators}

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """Sample; what is thrown away costs no draw."""
        with not_advanced(self._discarded().values()):
            return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the books of a step, with no generator left to be taken back."""
        with without_rows(self.input_batch.generators, self._discarded()):
            return super()._bookkeeping_sync(*args, **kwargs)


class PolicyGPUModelRunner(PolicyRunnerMixin, GPUModelRunner):
    """The CUDA V1 runner with sessions and policies."""

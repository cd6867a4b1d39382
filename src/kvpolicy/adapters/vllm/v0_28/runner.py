"""Model runners that add each session's RoPE shift to its positions. No arithmetic here: see kernels.rope_shift."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvpolicy.kernels.generators import seeded_generator
from kvpolicy.kernels.rope_shift import add_row_shift, shift_by_row

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


class RopeShiftMixin:
    """The shift, for any V1 model runner: after the slot mapping was computed, before the forward pass."""

    positions: Any
    req_indices: Any
    input_batch: Any
    device: Any

    def _update_streaming_request(self, req_id: str, new_req_data: NewRequestData) -> CachedRequestState:
        """Take over a session's chunk, its random generator included (the stock runner keeps the first chunk's)."""
        state = super()._update_streaming_request(req_id, new_req_data)  # type: ignore[misc] # likewise
        state.generator = seeded_generator(new_req_data.sampling_params.seed, self.device)
        return state

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, *args, **kwargs)  # type: ignore[misc] # the runner it is mixed into has it
        shifts = scheduler_output.kvpolicy.rope_shifts
        if shifts:
            tokens = slice(scheduler_output.total_num_scheduled_tokens)
            row_shift = shift_by_row(self.input_batch.req_ids, shifts, self.positions.device)
            add_row_shift(self.positions[tokens], self.req_indices.gpu[tokens], row_shift)
        return prepared


class SessionCPUModelRunner(RopeShiftMixin, CPUModelRunner):
    """The CPU runner with the shift."""


class SessionGPUModelRunner(RopeShiftMixin, GPUModelRunner):
    """The CUDA V1 runner with the shift."""

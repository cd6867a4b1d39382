"""vLLM's scheduler with policies: events are decided before a step is scheduled and travel with it."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.engine import FinishReason

from kvpolicy.adapters.vllm.v0_28.answers import AnsweringScheduler
from kvpolicy.adapters.vllm.v0_28.compactions import AppliedEvent, CompactionBook, PolicyAdmission
from kvpolicy.adapters.vllm.v0_28.engine_state import EngineBlocks
from kvpolicy.adapters.vllm.v0_28.guards import POLICIES, cache_errors, compaction_errors
from kvpolicy.adapters.vllm.v0_28.kv_spec import register_bounded_spec
from kvpolicy.adapters.vllm.v0_28.log import log_fault
from kvpolicy.adapters.vllm.v0_28.options import EngineOptions
from kvpolicy.adapters.vllm.v0_28.request_guards import RequestGuard
from kvpolicy.adapters.vllm.v0_28.wire import INTERNAL_KEY, Compaction, CompactionTotals, StepDirective
from kvpolicy.core.checks import reject
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.fold import Refuse

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from kvpolicy.adapters.vllm.v0_28.wire import CompactionWork

# Under vLLM's own logger, so that it is shown where vLLM's start-up messages are.
_log = init_logger("vllm.kvpolicy")


class CompactionScheduler(AnsweringScheduler):
    """The stock scheduler plus policies (R.31-R.43).

    A request that has a policy is compacted when its stored entries reach the length at which an event is due. Its
    ``num_computed_tokens`` stays absolute; its block table and the attention lengths follow the entries it holds.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Build the stock scheduler with our block manager, then the book of compactions.

        Raises:
            PolicyUsageError: every reason why policies cannot run in this engine.
        """
        options = EngineOptions.from_config(vllm_config)
        if options.compacts:
            if reasons := compaction_errors(vllm_config):
                raise PolicyUsageError(reasons)
            register_bounded_spec(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        if options.compacts and (
            reasons := cache_errors(vllm_config, self.kv_cache_config, self.hash_block_size, self.block_size, POLICIES)
        ):
            raise PolicyUsageError(reasons)
        blocks = EngineBlocks(self.kv_cache_manager)
        self.compactions = CompactionBook(
            admission=PolicyAdmission(
                options=options,
                block_size=self.block_size,
                num_pool_blocks=blocks.num_pool_blocks,
                context_limit=self.max_model_len,
            ),
            blocks=blocks,
        )
        self.request_guard = RequestGuard.of(vllm_config.model_config)
        self.totals = CompactionTotals()
        # Events of the step that is being scheduled, by request id.
        self._due: dict[str, AppliedEvent] = {}
        # Requests whose event was part of the last step: its outputs say how far they are.
        self._reporting: set[str] = set()
        if options.compacts:
            blocks.use_footprints(self.compactions)
            _log.info("kv_cache_policy: %s", options.kv_cache_policy or "off unless a request asks for one")

    def add_request(self, request: Request) -> None:
        """Take a new request; one that cannot be served as it asks is answered with an error at once."""
        if request.request_id in self.requests:
            self._answer(request, FinishReason.ERROR, Refuse("id_in_use", "another request has this id"))
        elif self._is_admitted(request):
            super().add_request(request)

    def _is_admitted(self, request: Request) -> bool:
        try:
            reject(self.request_guard.errors(request))
            self.compactions.admit(request)
        except PolicyUsageError as error:
            self._answer(request, FinishReason.ERROR, Refuse("not_admitted", str(error)))
            return False
        except Exception as error:  # noqa: BLE001 - a policy of somebody else's may raise anything
            log_fault("admission.failed", request_id=request.request_id)
            self._answer(request, FinishReason.ERROR, Refuse("internal_error", f"{type(error).__name__}: {error}"))
            return False
        return True

    # -- one step ---------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: FBT001, FBT002 - stock signature
        """Compact what is due, then schedule as usual: freed blocks can be used in the same step."""
        records = self.compactions.records
        if records:
            # A copy: an event that fails ends its request.
            for request in list(self.running):
                record = records.get(request.request_id)
                if record is not None and request.num_computed_tokens >= record.next_due:
                    self._guarded(request, partial(self._compact, request))
        return super().schedule(throttle_prefills)

    def _compact(self, request: Request) -> None:
        self._due[request.request_id] = self.compactions.compact(request.request_id, request.num_computed_tokens)

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """End a chunk where an event is due: a replay after a preemption fires the same events at the same lengths."""
        record = self.compactions.records.get(request.request_id)
        if record is not None:
            num_new_tokens = min(num_new_tokens, record.next_due - num_computed_tokens)
        return int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        """Look the request up in the prefix cache, but never beyond its prompt: events run anew over its reply."""
        blocks, num_hit, boundary, has_diverged = super()._get_local_prefix_cache_hit(request)
        record = self.compactions.records.get(request.request_id)
        if record is not None and num_hit > record.prompt_length:
            num_hit = record.prompt_length // self.block_size * self.block_size
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, num_hit)
        return blocks, num_hit, boundary, has_diverged

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        scheduler_output.kvpolicy = self._directive(scheduler_output)

    def _directive(self, scheduler_output: SchedulerOutput) -> StepDirective:
        """Return what the workers must know about a step."""
        if not self.compactions.records:
            return StepDirective()
        due, self._due = self._due, {}
        self._reporting = set(due)
        for applied in due.values():
            self.totals = self.totals.with_event(applied.event.num_dropped, applied.num_blocks_returned)
        kv_shift = self.compactions.kv_shift
        return StepDirective(
            kv_shifts={
                request_id: shift
                for request_id in scheduler_output.num_scheduled_tokens
                if (shift := kv_shift(request_id))
            },
            compactions=tuple(
                Compaction(request_id=request_id, event=applied.event, copies=applied.copies)
                for request_id, applied in due.items()
            ),
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process a step, and count what the workers did in it."""
        work: CompactionWork | None = getattr(model_runner_output, INTERNAL_KEY, None)
        if work is not None:
            self.totals = self.totals.with_work(work)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _after_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        reporting, self._reporting = self._reporting, set()
        if not reporting:
            return
        for output in chain.from_iterable(batch.outputs for batch in outputs.values()):
            request = self.requests.get(output.request_id)
            if output.request_id in reporting and request is not None and output.kv_transfer_params is None:
                result = self.compactions.result(output.request_id, request.num_computed_tokens)
                output.kv_transfer_params = result.to_wire(self.totals) if result is not None else None

    # -- preemption and the end -------------------------------------------------------------------------------------

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:  # noqa: FBT001, FBT002 - stock signature
        super()._preempt_request(request, timestamp, drop_stale_output)
        # An event of this very step goes with the blocks that it was about.
        self._due.pop(request.request_id, None)
        if self.compactions.preempted(request.request_id):
            self.totals = self.totals.with_preemption()

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> tuple[Any, Any]:  # noqa: FBT001, FBT002 - stock signature
        kv_params, ec_params = super()._free_request(request, delay_free_blocks)
        self._due.pop(request.request_id, None)
        result = self.compactions.close(request.request_id, request.num_computed_tokens)
        if result is not None:
            kv_params = result.to_wire(self.totals)
        return kv_params, ec_params

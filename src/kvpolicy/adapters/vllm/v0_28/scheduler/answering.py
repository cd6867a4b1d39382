"""vLLM's scheduler with answers that belong to no sampled token, and with hooks that cannot stop the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from kvpolicy.adapters.vllm.shared.log import log_fault
from kvpolicy.adapters.vllm.shared.messages import INTERNAL_KEY, STOP_PREFIX, TERMINAL
from kvpolicy.core.fold import Refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


class AnsweringScheduler(Scheduler):
    """The stock scheduler; refusals, rejections and failures are answered with the next step's outputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the stock scheduler; no answer is waiting."""
        super().__init__(*args, **kwargs)
        self._answers: list[tuple[int, EngineCoreOutput]] = []

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process a step, and send the answers with it."""
        # What was answered since the last step comes before this step's tokens: replies keep the order of their chunks.
        earlier, self._answers = self._answers, []
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        self._after_outputs(outputs)
        later, self._answers = self._answers, []
        for client_index, answer in reversed(earlier):
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs.insert(0, answer)
        for client_index, answer in later:
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(answer)
        return outputs

    def _after_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Do what has to wait until a step's outputs are built. For subclasses."""

    def has_finished_requests(self) -> bool:
        """Whether a step is owed although nothing is to be computed: also when an answer is waiting."""
        return bool(self._answers) or bool(super().has_finished_requests())

    def _answer(
        self, request: Request, reason: FinishReason, refusal: Refuse, params: Mapping[str, Any] | None = None
    ) -> None:
        """Answer a request without a token; ``params`` (default: code and message) ride on the answer."""
        ended = self.finished_req_ids_dict
        if ended is not None and reason in TERMINAL and request.request_id not in self.requests:
            # A load balancer counts what it has sent until it hears of the end, of what never began as well.
            ended[request.client_index].add(request.request_id)
        self._answers.append(
            (
                request.client_index,
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=reason,
                    stop_reason=STOP_PREFIX + refusal.code,
                    kv_transfer_params=dict(params)
                    if params is not None
                    else {INTERNAL_KEY: {"code": refusal.code, "message": refusal.message}},
                ),
            )
        )

    def _end(self, request: Request, refusal: Refuse) -> None:
        """End a request with an error; the others go on."""
        self._answer(request, FinishReason.ERROR, refusal)
        live = self.requests.get(request.request_id)
        if live is not None and not live.is_finished():
            self.finish_requests(live.request_id, RequestStatus.FINISHED_ERROR)

    def _guarded(self, request: Request, hook: Callable[[], object]) -> bool:
        """Run one request's part of a hook; return whether it went well.

        Whatever it raises ends that request and nothing else (R.13).
        """
        try:
            hook()
        except Exception as error:  # noqa: BLE001 - the one place that must: nothing may stop the engine for others
            log_fault("hook.failed", request_id=request.request_id)
            self._end(request, Refuse("internal_error", f"{type(error).__name__}: {error}"))
            return False
        return True

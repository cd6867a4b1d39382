"""The offline facade: vLLM's own LLM with a policy for its KV cache. It only translates."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import vllm

from kvpolicy.adapters.vllm.shared.messages import RequestKey
from kvpolicy.adapters.vllm.shared.metrics import CompactionCounters, CompactionStatLogger
from kvpolicy.adapters.vllm.shared.refusals import reasons_of_processes
from kvpolicy.adapters.vllm.v0_28.frontend.output_processor import PolicyOutputProcessor, sendable
from kvpolicy.adapters.vllm.v0_28.startup.engine_args import policy_arguments
from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpolicy.adapters.vllm.shared.messages import CompactionTotals


class LLM(vllm.LLM):
    """vLLM's offline engine, with ``kv_cache_policy``.

    Takes every argument of the stock class. What a policy did to a request is in
    ``RequestOutput.kv_transfer_params["kvpolicy"]``.
    """

    def __init__(self, model: str, *, kv_cache_policy: str | Mapping[str, Any] | None = None, **arguments: Any) -> None:
        """Start an engine.

        Args:
            model: Hugging Face id or folder.
            kv_cache_policy: for every request that brings none in ``SamplingParams.extra_args["kv_cache_policy"]``: a
                name, or a mapping with its options such as ``{"type": "randkv", "budget": 2048}``. "off": requests are
                dense unless they bring one. Unset: the engine is the stock one.
            **arguments: stock arguments.

        Raises:
            PolicyUsageError: every reason why that cannot be: what the configuration tells before the engine is
                started, what the loaded model tells before it is ready.
        """
        arguments = {"model": model, **arguments}
        if kv_cache_policy is not None:
            arguments = policy_arguments(arguments, kv_cache_policy)
        with reasons_of_processes():
            super().__init__(**arguments)
        engine = self.llm_engine
        self._counters = CompactionCounters()
        # No step has run yet: nothing is lost with the stock one.
        engine.output_processor = PolicyOutputProcessor.of_engine(engine, self._counters)
        self._admission = engine.output_processor.admission
        if engine.logger_manager is not None and self._admission.options.compacts:
            show = CompactionStatLogger(engine.vllm_config, counters=self._counters)
            engine.logger_manager.stat_loggers.append(show)

    @property
    def compaction_totals(self) -> CompactionTotals:
        """Engine-wide counters, as of the last output."""
        return self._counters.totals

    def _render_and_add_requests(self, prompts: Any, params: Sequence[Any], **more: Any) -> list[str]:
        """Add the prompts of one call; each draws by its position in it."""
        if self._admission.options.compacts:
            params = [_with_key(sendable(params[i]), str(i)) for i in range(len(params))]
        request_ids: list[str] = super()._render_and_add_requests(prompts, params, **more)
        return request_ids

    def beam_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search with beams, where no request can have a policy.

        Raises:
            PolicyUsageError: the engine was started for policies.
        """
        if self._admission.options.compacts:
            raise PolicyUsageError("beam_search: not supported with kv_cache_policy; use an engine without it")
        return super().beam_search(*args, **kwargs)


def _with_key(params: Any, key: str) -> Any:
    """Return a copy of sampling parameters that carries a request key; anything else as it is."""
    if not hasattr(params, "extra_args"):
        return params
    keyed = copy(params)
    keyed.extra_args = RequestKey(key).to_extra_args(params.extra_args)
    return keyed

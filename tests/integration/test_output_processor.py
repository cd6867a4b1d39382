"""The front end's half of a session alone: what it makes of the engine core's outputs, vLLM's own beside ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from kvpolicy.adapters.vllm.v0_28.collector import BoundaryCollector
from kvpolicy.adapters.vllm.v0_28.metrics import CompactionCounters
from kvpolicy.adapters.vllm.v0_28.output_processor import SessionOutputProcessor


def parts(kind: str) -> tuple[Any, Any]:
    """Return a processor and a queue."""
    if kind == "stock":
        return OutputProcessor(None, log_stats=False), RequestOutputCollector(RequestOutputKind.DELTA, "a")
    ours: Any = SessionOutputProcessor
    return (
        ours(None, log_stats=False, admission=None, request_guard=None, counters=CompactionCounters(), streams={}),
        BoundaryCollector(RequestOutputKind.DELTA, "a"),
    )


@pytest.mark.parametrize(
    "kind",
    [pytest.param("stock", marks=pytest.mark.xfail(reason="it gives all of them once more", strict=True)), "ours"],
)
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ABORT], ids=str)
def test_an_output_without_tokens_has_no_logprobs(kind: str, reason: FinishReason) -> None:
    """A reply whose last token was rejected, and one that is cut off: each token's log-probabilities come once."""
    processor, queue = parts(kind)
    params = SamplingParams(max_tokens=8, logprobs=1, output_kind=RequestOutputKind.DELTA, detokenize=False)
    request = EngineCoreRequest(
        request_id="a",
        prompt_token_ids=[5] * 5,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        resumable=True,
        external_req_id="a",
    )
    processor.add_request(request, None, None, 0, queue)
    told: list[tuple[int, int]] = []
    for token in (7, 8, None):
        logprobs = LogprobsLists(np.array([[token, 3]]), np.array([[-0.1, -0.2]]), np.array([1])) if token else None
        ended = None if token else reason
        processor.process_outputs(
            [EngineCoreOutput("a", [token] if token else [], new_logprobs=logprobs, finish_reason=ended)]
        )
        completion = queue.get_nowait().outputs[0]
        told.append((len(completion.token_ids), len(completion.logprobs)))
    assert told == [(1, 1), (1, 1), (0, 0)]

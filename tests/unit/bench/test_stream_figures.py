"""The figures of a run."""

from __future__ import annotations

import pytest

from kvpolicy.bench.processes.engine_log import find_reason
from kvpolicy.bench.streams.figures import describe_end, quantile, same_replies, summarise, verdict
from kvpolicy.bench.streams.records import EngineKind, Outcome, RunEnd

from .runs import row, run

TRACE = """\
(EngineCore pid=7) ERROR 08-01 10:00:00 [core.py:9] Traceback (most recent call last):
(EngineCore pid=7) ERROR 08-01 10:00:00 [core.py:9]     start[req_index, :n] = tokens
(EngineCore pid=7) ERROR 08-01 10:00:00 [core.py:9] ValueError: could not broadcast (66,) into (64,)
ERROR 08-01 10:00:01 [async_llm.py:7] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


def test_early_is_chunks_5_to_25_and_late_the_last_20() -> None:
    rows = [row(chunk, ttft_s=float(chunk), host_memory_bytes=chunk) for chunk in range(1, 101)]

    summary = summarise(run(*rows))

    assert summary.ttft_early_s == 15
    assert summary.ttft_late_s == 90.5
    assert (summary.memory_early_bytes, summary.memory_late_bytes) == (15, 90)


def test_counts_and_peaks() -> None:
    rows = [
        row(1, resident_tokens=100, num_blocks=4),
        row(2, resident_tokens=160, num_blocks=6, num_evicted_tokens=32),
        row(3, resident_tokens=130, num_blocks=5, num_evicted_tokens=64, consolidated=True),
    ]

    summary = summarise(run(*rows))

    assert (summary.max_resident_tokens, summary.max_blocks) == (160, 6)
    assert (summary.num_evictions, summary.num_evicted_tokens, summary.num_consolidations) == (2, 96, 1)


def test_a_run_without_rows_has_no_medians() -> None:
    summary = summarise(run())

    assert summary.ttft_early_s is None
    assert summary.memory_late_bytes is None
    assert summary.max_blocks == 0


@pytest.mark.parametrize(("share", "expected"), [(0.2, 2.0), (0.5, 5.0), (0.8, 8.0), (1.0, 10.0), (0.0, 1.0)])
def test_quantiles_are_values_of_the_sample(share: float, expected: float) -> None:
    assert quantile([float(n) for n in range(10, 0, -1)], share) == expected


def test_no_values_have_no_quantile() -> None:
    assert quantile([], 0.5) is None


def test_replies_are_compared_up_to_the_first_eviction() -> None:
    ours = run(row(1), row(2, reply="mine"), row(3), row(4, num_evicted_tokens=32), row(5))
    stock = run(*(row(chunk) for chunk in range(1, 6)), kind=EngineKind.STOCK)

    assert same_replies(ours, stock) == (2, 3)


def test_the_promise_is_kept() -> None:
    assert verdict(run(row(1, resident_tokens=1024), budget=1024)) == ()


def test_a_session_over_its_budget_fails() -> None:
    (failure,) = verdict(run(row(1, resident_tokens=1025), budget=1024))

    assert "1025 > 1024" in failure


def test_a_session_that_ended_fails() -> None:
    end = RunEnd(outcome=Outcome.FAILED, error="SessionFailedError: engine")

    (failure,) = verdict(run(row(1), end=end, num_chunks=9))

    assert "chunk 2 of 9: SessionFailedError" in failure


def test_the_reason_of_a_death_is_the_first_error_of_the_engine() -> None:
    assert find_reason(TRACE) == "ValueError: could not broadcast (66,) into (64,)"


@pytest.mark.parametrize("log", ["", "all is well\n", TRACE.splitlines()[-1]])
def test_a_log_without_a_cause_names_none(log: str) -> None:
    assert find_reason(log) == ""


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (RunEnd(outcome=Outcome.FINISHED), "alive after 1 chunks"),
        (RunEnd(outcome=Outcome.DIED), "engine died at chunk 2"),
        (
            RunEnd(outcome=Outcome.DIED, error="EngineDeadError", reason="ValueError: x"),
            "engine died at chunk 2: ValueError: x; the client saw EngineDeadError",
        ),
        (RunEnd(outcome=Outcome.TIMED_OUT), "no answer to chunk 2 of 3"),
    ],
)
def test_an_end_is_one_line(end: RunEnd, expected: str) -> None:
    num_chunks = 1 if end.outcome is Outcome.FINISHED else 3

    assert describe_end(run(row(1), end=end, num_chunks=num_chunks)) == expected

"""The benchmark's pure parts, and its parent's side with a child that is a few lines of Python."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from attrs import asdict, evolve
from rich.console import Console
from typer.testing import CliRunner

from kvpolicy.bench.decode import engines
from kvpolicy.bench.decode.cases import (
    CASES,
    POLICIES,
    Case,
    Figure,
    Flags,
    Kind,
    Target,
    Workload,
    find_cases,
    find_flags,
    find_policies,
)
from kvpolicy.bench.decode.engines import EngineLostError, live_engine
from kvpolicy.bench.decode.figures import (
    CaseResult,
    Failure,
    PairRow,
    preempted,
    spread,
    summarise,
    to_json,
    verdicts,
)
from kvpolicy.bench.decode.measure import sized
from kvpolicy.bench.decode.steps import RunRow, Step, decoded_tokens, summarise_steps
from kvpolicy.bench.decode.tables import cost_table, heading, interval, remarks, speed_table
from kvpolicy.bench.kernels import KernelTime, event_at, kernel_table, measure
from kvpolicy.bench.processes import parent
from kvpolicy.cli.app import app
from kvpolicy.core.compaction import expand
from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.table import Table

WORKLOAD = Workload(seed="a", num_requests=2, prompt_tokens=4, new_tokens=3)
CASE = Case(
    name="made-up",
    shows="nothing",
    new_tokens=100,
    quick_tokens=10,
    num_blocks=20,
    targets=(Target(Figure.OF_LIMIT, 0.9), Target(Figure.OF_STOCK, 2.0)),
    allows_preemptions=False,
)


def run_row(speed: float, **more: Any) -> RunRow:
    """Return the row of a run of one second, half of which is decoding, at twice the speed."""
    values: dict[str, Any] = {
        "num_output_tokens": int(speed),
        "wall_s": 1.0,
        "num_decode_tokens": int(speed),
        "decode_s": 0.5,
        "num_steps": 10,
        "num_decode_steps": 9,
        "num_event_steps": 0,
        "step_ms": 10.0,
        "step_slow_ms": 12.0,
        "event_step_ms": None,
    }
    return RunRow(**(values | more))


def result(*rows: PairRow, case: Case = CASE, failures: tuple[Failure, ...] = ()) -> CaseResult:
    return CaseResult(case=case, flags=Flags.EAGER, rows=rows, failures=failures, facts={})


def pair(kind: Kind, number: int, speed: float, **more: Any) -> PairRow:
    return PairRow(kind=kind, pair=number, row=run_row(speed, **more))


THREE_PAIRS = result(
    *(pair(Kind.STOCK, i, speed) for i, speed in enumerate((100, 50, 100))),
    *(pair(Kind.LIMIT, i, 110) for i in range(3)),
    *(pair(Kind.HEAD, i, speed, num_events=4, expand_s=0.002) for i, speed in enumerate((200, 150, 210))),
)


def text_of(*parts: Table) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


# -- steps


def test_a_step_decodes_if_every_request_grows_by_one_token_at_most() -> None:
    assert decoded_tokens([64, 70], [65, 71]) == 2
    assert decoded_tokens([64, 0], [65, 0]) == 1  # one waits
    assert decoded_tokens([64, 0], [65, 64]) == 0  # a prompt
    assert decoded_tokens([64, 70], [65, 0]) == 0  # a preemption


def test_steps_are_told_apart_by_what_they_did() -> None:
    steps = [
        Step(duration_s=0.5, num_tokens=0),
        *(Step(duration_s=0.010 + 0.001 * i, num_tokens=2) for i in range(3)),
        Step(duration_s=0.030, num_tokens=2, num_events=2),
    ]
    row = summarise_steps(steps, num_output_tokens=10, wall_s=2.0)

    assert (row.num_steps, row.num_decode_steps, row.num_event_steps, row.num_events) == (5, 4, 1, 2)
    assert row.step_ms == pytest.approx(11)
    assert row.event_step_ms == pytest.approx(30)
    assert row.tokens_per_s == 5
    assert row.decode_tokens_per_s == pytest.approx(8 / 0.063)


def test_a_run_without_decode_steps_has_no_speed_of_decoding() -> None:
    row = summarise_steps([Step(duration_s=0.5, num_tokens=0)], num_output_tokens=1, wall_s=0.5)

    assert (row.step_ms, row.event_step_ms, row.decode_tokens_per_s) == (None, None, None)


# -- cases


def test_names_of_cases_policies_and_flags() -> None:
    assert find_cases(()) == CASES
    assert [case.name for case in find_cases(["off", "short"])] == ["short", "off"]
    assert find_policies(()) == POLICIES
    assert find_policies(["sink-window"]) == (Kind.SINK_WINDOW,)
    assert find_flags("both") == (Flags.EAGER, Flags.PRODUCTION)
    for wrong in (lambda: find_cases(["x"]), lambda: find_policies(["off"]), lambda: find_flags("x")):
        with pytest.raises(PolicyUsageError, match="unknown name"):
            wrong()


def test_every_dense_request_fits_unless_a_case_says_otherwise() -> None:
    for case in (*CASES, *sized(CASES, is_quick=True)):
        blocks = -(-(case.prompt_tokens + case.asked_tokens) // case.block_size)
        if case.num_blocks is None:
            assert case.pool > case.num_requests * blocks
        else:
            assert blocks < case.pool < case.num_requests * blocks
        # The longest that a policy holds: in steady state, or with whole blocks.
        held = case.budget + case.buffer_size + max(case.buffer_size, 2 * case.block_size)
        assert case.pool > case.num_requests * -(-held // case.block_size) or case.asked_tokens < held


def test_the_limit_has_the_length_between_events() -> None:
    workload = CASE.workload(Kind.LIMIT, 0)

    assert (workload.prompt_tokens, workload.new_tokens) == (256 + 96 - 16, 32)
    assert CASE.context == 368


def test_the_engines_of_a_pair_get_the_same_prompts_and_those_of_another_pair_get_others() -> None:
    assert CASE.workload(Kind.STOCK, 1) == CASE.workload(Kind.HEAD, 1) != CASE.workload(Kind.HEAD, 2)


def test_engines_differ_by_their_policy_alone() -> None:
    assert CASE.policy(Kind.STOCK) is CASE.policy(Kind.LIMIT) is None
    assert CASE.policy(Kind.BLOCK) == {"type": "randkv", "granularity": "block", "budget": 256, "buffer_size": 64}
    assert CASE.policy(Kind.SINK_WINDOW) == {"type": "sink_window", "budget": 256, "buffer_size": 64}
    eager, production = (CASE.engine_arguments("m", flags) for flags in Flags)
    assert (eager["enforce_eager"], eager["enable_prefix_caching"]) == (True, False)
    assert (production["enforce_eager"], production["enable_prefix_caching"]) == (False, True)


# -- figures


def test_ratios_are_taken_within_pairs() -> None:
    of_stock = THREE_PAIRS.figure(Kind.HEAD, Figure.OF_STOCK)
    of_limit = THREE_PAIRS.figure(Kind.HEAD, Figure.OF_LIMIT)

    assert of_stock == spread([2.0, 3.0, 2.1])
    assert of_limit == spread([200 / 220, 150 / 220, 210 / 220])
    assert interval(of_stock) == "2.10 [2.00-3.00]"


def test_a_pair_that_lacks_a_side_does_not_count() -> None:
    lacking = evolve(THREE_PAIRS, rows=THREE_PAIRS.rows[1:])

    assert lacking.figure(Kind.HEAD, Figure.OF_STOCK) == spread([3.0, 2.1])
    assert result(pair(Kind.HEAD, 0, 1)).figure(Kind.HEAD, Figure.OF_STOCK) is None


def test_event_times_are_for_one_event() -> None:
    figures = summarise(THREE_PAIRS.of(Kind.HEAD))

    assert (figures.num_events, figures.expand_ms, figures.relocate_ms) == (4, 0.5, 0)
    assert summarise(THREE_PAIRS.of(Kind.STOCK)).expand_ms is None


def test_targets_are_judged_by_medians_and_not_in_quick_sizes() -> None:
    assert [(verdict.kind, verdict.is_reached) for verdict in verdicts(THREE_PAIRS)] == [
        (Kind.HEAD, True),
        (Kind.HEAD, True),
    ]
    slow = result(pair(Kind.STOCK, 0, 100), pair(Kind.HEAD, 0, 150))
    assert [(verdict.found, verdict.is_reached) for verdict in verdicts(slow)] == [(None, False), (1.5, False)]
    assert verdicts(evolve(slow, case=evolve(CASE, is_quick=True))) == ()


def test_preemptions_of_ours_are_told_where_there_must_be_none() -> None:
    rows = (pair(Kind.STOCK, 0, 100, num_preemptions=5), pair(Kind.HEAD, 0, 100, num_preemptions=1))

    assert preempted(result(*rows)) == (Kind.HEAD,)
    assert preempted(result(*rows, case=evolve(CASE, allows_preemptions=True))) == ()


def test_the_report_holds_settings_figures_and_every_row() -> None:
    value = json.loads(json.dumps(to_json(THREE_PAIRS)))

    assert value["figures"]["randkv-head"]["x stock"]["median"] == 2.1
    assert value["settings"]["num_blocks"] == 20
    assert len(value["rows"]) == 9
    assert value["rows"][0]["tokens_per_s"] == 100
    assert [verdict["is_reached"] for verdict in value["verdicts"]] == [True, True]


# -- tables


def test_tables_show_every_engine() -> None:
    text = text_of(speed_table(THREE_PAIRS), cost_table(THREE_PAIRS))

    for part in ("stock", "limit", "randkv-head", "2.10 [2.00-3.00]", "0.91", "0.50"):
        assert part in text
    assert heading(THREE_PAIRS).startswith("made-up, eager: nothing (8 x 100 tokens, 20 blocks of 32")


def test_what_went_wrong_is_said_under_the_table() -> None:
    failures = (
        Failure(kind=Kind.BLOCK, pair=1, error="no memory"),
        Failure(kind=Kind.SHARED, pair=None, error="no start"),
    )
    lines = remarks(
        result(
            pair(Kind.STOCK, 0, 100),
            pair(Kind.HEAD, 0, 150, num_preemptions=2, other_cpu_s=0.5),
            failures=failures,
        )
    )

    assert lines == [
        "randkv-head: - of the limit, MISSED (>= 0.9)",
        "randkv-head: 1.500 x stock, MISSED (>= 2.0)",
        "randkv-head: MISSED (0 preemptions)",
        "randkv-block: FAILED in pair 2: no memory",
        "randkv-shared: FAILED at the start: no start",
        "doubtful: other processes were running beside randkv-head",
    ]


# -- the parent's side


def script(folder: Path, *lines: str) -> Path:
    path = folder / "child.py"
    say = "def say(kind, **fields): print(json.dumps({'message': kind, **fields}), flush=True)"
    path.write_text("\n".join(["import json, sys, time", say, *lines]), encoding="utf-8")
    return path


def child(folder: Path, *lines: str) -> Any:
    job = {"arguments": {"model": str(folder)}, "policy": None, "extra_args": None}
    command = (str(script(folder, "sys.stdin.readline()", *lines)),)
    return live_engine(job, log=folder / "log", command=command)


ROW = f"say('row', row={asdict(run_row(7))!r})"


def test_an_engine_takes_one_workload_after_the_other(tmp_path: Path) -> None:
    made: list[int] = []
    lines = ("say('started', facts={'vllm': '0'})", "for line in sys.stdin:", "  say('progress', num_tokens=3)")
    with child(tmp_path, *lines, f"  {ROW}") as engine:
        assert engine.facts == {"vllm": "0"}
        assert [engine.run(WORKLOAD, made.append).num_output_tokens for _ in range(2)] == [7, 7]
    assert made == [3, 3]
    assert engine.child.process.returncode == 0


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (("sys.exit(3)",), "process ended with status 3"),
        (("say('failed', error='ValueError: no room')",), "ValueError: no room"),
        (("print('x ValueError: no room', file=sys.stderr)", "sys.exit(1)"), r"status 1 \(ValueError: no room\)"),
    ],
)
def test_an_engine_that_does_not_start_says_why(tmp_path: Path, lines: tuple[str, ...], error: str) -> None:
    with pytest.raises(EngineLostError, match=error), child(tmp_path, *lines):
        pass


def test_an_engine_that_hangs_is_given_up_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "RUN_LIMIT_S", 0.3)
    monkeypatch.setattr(parent, "_GOODBYE_S", 0.3)
    with child(tmp_path, "say('started', facts={})", "time.sleep(60)") as engine:
        with pytest.raises(EngineLostError, match="nothing heard"):
            engine.run(WORKLOAD, print)
        assert engine.child.process.poll() is None
    assert engine.child.process.returncode == -9


# -- kernels and the command line


def test_an_event_moves_as_many_entries_as_it_drops() -> None:
    assert len(expand(event_at(256), 0, 0).moves) == 64


def test_times_are_best_and_median_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    clock = iter_clock()
    monkeypatch.setattr("kvpolicy.bench.kernels.time.perf_counter", lambda: next(clock))
    best, middle, runs = measure(numbers.append, least_runs=3, least_s=0.0)

    assert (best, middle, runs) == (1000, 1000, 3)
    assert numbers == [0, 1, 2, 3, 4, 0, 1, 2]


def iter_clock() -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += 1.0


def test_kernel_times_are_judged_by_their_median() -> None:
    times = [
        KernelTime(name="a", executor="torch", best_ms=1, median_ms=2, num_runs=5, target_ms=1.5),
        KernelTime(name="b", executor="torch", best_ms=1, median_ms=2, num_runs=5),
    ]
    text = text_of(kernel_table(times))

    assert "MISSED" in text
    assert "reached" not in text


def test_help_names_every_case_and_policy() -> None:
    output = CliRunner().invoke(app, ["bench", "decode", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output

    words = " ".join(output.replace("│", " ").split())
    for name in (*(case.name for case in CASES), *(kind.value for kind in POLICIES), "eager", "production"):
        assert name in words
    assert "--model" not in output

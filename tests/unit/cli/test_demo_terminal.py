"""What is shown with and without a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from kvpolicy.bench.streams.records import EngineKind, Outcome, RunEnd, StreamSettings
from kvpolicy.cli.demo.terminal import LiveView, PlainView, shorten, summary_rows, summary_table, view_for
from tests.unit.bench.runs import row, run

SETTINGS = StreamSettings(model="m", num_chunks=3)


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, height=20, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_each_chunk_is_a_line() -> None:
    plain = console(terminal=False)

    with view_for(plain, EngineKind.BOUNDED, SETTINGS) as view:
        view.stage("starting")
        view.row(row(1))
        view.row(row(2, num_evicted_tokens=32, consolidated=True))

    lines = printed(plain).splitlines()
    assert lines[0] == "kvpolicy session: starting ..."
    assert lines[1] == (
        "kvpolicy session: chunk 1/3, TTFT 100 ms, 70 tokens in 3 blocks, evicted 0, consolidations 0: reply 1"
    )
    assert "evicted 32, consolidations 1 *: reply 2" in lines[2]


def test_a_terminal_gets_a_table_that_keeps_the_last_rows() -> None:
    terminal = console(terminal=True)

    with view_for(terminal, EngineKind.STOCK, SETTINGS) as view:
        assert isinstance(view, LiveView)
        for chunk in range(1, 41):
            view.row(row(chunk))

    last_table = printed(terminal).rpartition("stock vLLM\n")[2]
    assert "reply 40" in last_table
    assert "reply 30" in last_table
    assert "reply 20 " not in last_table


def test_the_view_follows_the_console() -> None:
    assert isinstance(view_for(console(terminal=False), EngineKind.STOCK, SETTINGS), PlainView)


def test_long_replies_are_cut() -> None:
    assert shorten("word " * 30, 10) == "word word…"


def test_the_summary_puts_both_runs_side_by_side() -> None:
    died = RunEnd(outcome=Outcome.DIED, error="EngineDeadError", reason="ValueError: no room")
    ours = run(*(row(chunk) for chunk in range(1, 31)), temperature=0.0)
    stock = run(row(1), kind=EngineKind.STOCK, end=died, num_chunks=30)

    lines = {label: cells for label, *cells in summary_rows([ours, stock])}

    assert lines["chunks survived"] == ["30 of 30", "1 of 30"]
    assert lines["TTFT, median of chunks 5-25"] == ["100 ms", "-"]
    assert lines["same replies before eviction"] == ["1 of 1", ""]
    assert lines["how it ended"] == ["alive after 30 chunks", "engine died at chunk 2"]


def test_random_replies_are_not_compared() -> None:
    labels = [label for label, *_ in summary_rows([run(row(1)), run(row(1), kind=EngineKind.STOCK)])]

    assert "chunks survived" in labels
    assert "same replies before eviction" not in labels


def test_the_summary_can_stand_alone() -> None:
    plain = console(terminal=False)

    plain.print(summary_table(run(row(1)), None))

    assert "stock" not in printed(plain)

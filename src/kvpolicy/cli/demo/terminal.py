"""Shows runs on a terminal while they go (a live table) or, without a terminal, as plain lines."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from kvpolicy.bench.streams.figures import name_end, same_replies, summarise
from kvpolicy.bench.streams.records import EngineKind

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from rich.console import Console

    from kvpolicy.bench.streams.records import ChunkRow, Run, StreamSettings

TITLES = {EngineKind.BOUNDED: "kvpolicy session", EngineKind.STOCK: "stock vLLM"}
_REPLY_WIDTHS = (20, 70)
# What the other columns of the live table need.
_OTHER_COLUMNS = 66
# Lines around the rows of the live table: title, header, rules, progress bar.
_FRAME_LINES = 9
_MOST_ROWS = 14


def shorten(text: str, width: int = _REPLY_WIDTHS[1]) -> str:
    r"""Return the text on one line, cut to a width.

    >>> shorten("a long\nreply", 8)
    'a long …'
    """
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def row_cells(row: ChunkRow, num_consolidations: int) -> tuple[str, ...]:
    """Return what the table shows of a row."""
    return (
        str(row.chunk),
        f"{1000 * row.ttft_s:.0f} ms",
        shorten(row.reply),
        str(row.resident_tokens),
        str(row.num_blocks),
        str(row.num_evicted_tokens) if row.num_evicted_tokens else "",
        f"{num_consolidations} *" if row.consolidated else str(num_consolidations),
    )


class LiveView:
    """A spinner while the engine starts, then the last rows and a progress bar. A context manager."""

    def __init__(self, console: Console, kind: EngineKind, settings: StreamSettings) -> None:
        """Prepare the view of one run."""
        self._title = TITLES[kind]
        self._reply_width = min(max(console.width - _OTHER_COLUMNS, _REPLY_WIDTHS[0]), _REPLY_WIDTHS[1])
        most = max(3, min(_MOST_ROWS, console.height - _FRAME_LINES))
        self._rows: deque[tuple[str, ...]] = deque(maxlen=most)
        self._num_consolidations = 0
        self._progress = Progress(
            SpinnerColumn(finished_text="■"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task(f"{self._title}: starting", total=settings.num_chunks)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Draw a last time; what was drawn stays."""
        self._progress.stop_task(self._task)
        self._live.stop()

    def stage(self, text: str) -> None:
        """Show what is being done."""
        self._progress.update(self._task, description=f"{self._title}: {text}")

    def row(self, row: ChunkRow) -> None:
        """Add an answered chunk."""
        if not self._rows:
            self.stage("streaming")
        self._num_consolidations += row.consolidated
        self._rows.append(row_cells(row, self._num_consolidations))
        self._progress.update(self._task, completed=row.chunk)

    def _render(self) -> Group:
        if not self._rows:
            return Group(self._progress)
        table = Table(title=self._title, title_justify="left", title_style="bold", expand=False)
        for name in ("chunk", "TTFT"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("reply", width=self._reply_width, no_wrap=True, overflow="ellipsis")
        for name in ("resident", "blocks", "evicted", "consol."):
            table.add_column(name, justify="right", no_wrap=True)
        for cells in self._rows:
            table.add_row(*cells)
        return Group(table, self._progress)


class PlainView:
    """One line per stage and per chunk: for logs and pipes. Use it as a context manager."""

    def __init__(self, console: Console, kind: EngineKind, settings: StreamSettings) -> None:
        """Prepare the view of one run."""
        self._console, self._title, self._total = console, TITLES[kind], settings.num_chunks
        self._num_consolidations = 0

    def __enter__(self) -> Self:
        """Return the view itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left to do."""

    def stage(self, text: str) -> None:
        """Say what is being done."""
        self._print(f"{self._title}: {text} ...")

    def row(self, row: ChunkRow) -> None:
        """Say that a chunk was answered."""
        self._num_consolidations += row.consolidated
        number, ttft, reply, resident, blocks, evicted, consolidations = row_cells(row, self._num_consolidations)
        self._print(
            f"{self._title}: chunk {number}/{self._total}, TTFT {ttft}, "
            f"{resident} tokens in {blocks} blocks, "
            f"evicted {evicted or 0}, consolidations {consolidations}: {reply}"
        )

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def view_for(console: Console, kind: EngineKind, settings: StreamSettings) -> LiveView | PlainView:
    """Return the view that suits the console."""
    return (LiveView if console.is_terminal else PlainView)(console, kind, settings)


def summary_table(ours: Run, stock: Run | None) -> Table:
    """Return the figures of both runs beside each other."""
    runs = [ours] if stock is None else [ours, stock]
    table = Table(title="Same text, same model", title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(TITLES[run.kind], justify="right", no_wrap=True)
    for label, *cells in summary_rows(runs):
        table.add_row(label, *cells)
    return table


def summary_rows(runs: list[Run]) -> list[tuple[str, ...]]:
    """Return the lines of the summary: a label, then one cell per run."""
    summaries = [summarise(run) for run in runs]
    lines = [
        ("how it ended", *(name_end(run) for run in runs)),
        ("chunks survived", *(f"{s.num_survived} of {s.num_asked}" for s in summaries)),
        ("TTFT, median of chunks 5-25", *(_ms(s.ttft_early_s) for s in summaries)),
        ("TTFT, median of the last 20", *(_ms(s.ttft_late_s) for s in summaries)),
        ("resident tokens, highest", *(str(s.max_resident_tokens) for s in summaries)),
        ("blocks, highest", *(str(s.max_blocks) for s in summaries)),
        ("evictions (tokens)", *(f"{s.num_evictions} ({s.num_evicted_tokens})" for s in summaries)),
        ("consolidations", *(str(s.num_consolidations) for s in summaries)),
        ("host memory, chunks 5-25", *(_mib(s.memory_early_bytes) for s in summaries)),
        ("host memory, last 20", *(_mib(s.memory_late_bytes) for s in summaries)),
        ("engine start", *(f"{run.start_s:.0f} s" for run in runs)),
        ("whole run", *(f"{run.wall_s:.0f} s" for run in runs)),
    ]
    # Random replies are not comparable: the stock engine does not take a chunk's seed.
    if len(runs) > 1 and runs[0].settings.temperature == 0:
        same, of = same_replies(runs[0], runs[1])
        lines.append(("same replies before eviction", f"{same} of {of}", ""))
    return lines


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / (1 << 20):.0f} MiB"

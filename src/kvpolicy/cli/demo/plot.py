"""Draws two runs of the same stream side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from kvpolicy.bench.streams.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvpolicy.bench.streams.records import ChunkRow, Run

OURS, STOCK, LIMIT, QUIET = "#0b6e99", "#c8442c", "#555555", "#9a9a9a"


def plot_runs(ours: Run, stock: Run | None, folder: Path) -> tuple[Path, ...]:
    """Write ``session.png`` and ``session.svg`` into ``folder`` and return their paths.

    Three panels over the chunk number: resident tokens, time to first token, next RoPE position.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=True, height_ratios=[3, 3, 2])
    runs = [run for run in (ours, stock) if run is not None]
    _draw_resident(axes[0], runs)
    _draw_ttft(axes[1], runs)
    _draw_positions(axes[2], runs, ours)
    for ax in axes:
        _finish(ax, ours, stock)
    _name_end(axes[0], stock)
    axes[0].legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)
    axes[-1].set_xlabel("chunk")
    axes[0].set_xlim(0, ours.settings.num_chunks + 1)
    figure.suptitle(_title(ours), x=0.01, ha="left", fontsize=13, fontweight="bold")
    paths = tuple(folder / f"session.{suffix}" for suffix in ("png", "svg"))
    for path in paths:
        figure.savefig(path, dpi=140)
    return paths


def _title(ours: Run) -> str:
    settings = ours.settings
    model = settings.model.rstrip("/").rpartition("/")[2]
    return f"One text session, {settings.num_chunks} chunks, {model}"


def _draw_resident(ax: Any, runs: Sequence[Run]) -> None:  # noqa: ANN401 - matplotlib's
    settings = runs[0].settings
    for run in runs:
        _line(ax, run, [row.resident_tokens for row in run.rows])
    ax.axhline(settings.context, color=STOCK, linewidth=1, linestyle="--")
    ax.axhline(settings.budget, color=OURS, linewidth=1, linestyle="--")
    right = settings.num_chunks
    ax.annotate(
        f"context limit {settings.context}",
        (right, settings.context),
        (0, 4),
        textcoords="offset points",
        ha="right",
        color=STOCK,
    )
    ax.annotate(
        f"budget {settings.budget}",
        (right, settings.budget),
        (0, 4),
        textcoords="offset points",
        ha="right",
        color=OURS,
    )
    ax.set_ylabel("resident KV tokens")
    ax.set_ylim(0, 1.18 * max(settings.context, settings.budget))


def _draw_ttft(ax: Any, runs: Sequence[Run]) -> None:  # noqa: ANN401 - matplotlib's
    for run in runs:
        _line(ax, run, [1000 * row.ttft_s for row in run.rows])
    ax.set_ylabel("time to first token (ms)")
    # The first chunk and the consolidations take several times as long as the rest: a line would lie flat.
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")


def _draw_positions(ax: Any, runs: Sequence[Run], ours: Run) -> None:  # noqa: ANN401 - matplotlib's
    for run in runs:
        _line(ax, run, [row.next_position for row in run.rows])
    trained = ours.facts.get("trained_range")
    if trained:
        limit = ours.settings.consolidation_threshold * trained
        ax.axhline(limit, color=LIMIT, linewidth=1, linestyle="--")
        ax.annotate(
            f"consolidation below {limit:.0f} ({ours.settings.consolidation_threshold:g} x trained range)",
            (ours.settings.num_chunks, limit),
            (0, 5),
            textcoords="offset points",
            ha="right",
            color=LIMIT,
        )
        ax.set_ylim(0, 1.25 * max(limit, ours.settings.context))
    ax.set_ylabel("next RoPE position")


def _line(ax: Any, run: Run, values: Sequence[float]) -> None:  # noqa: ANN401 - matplotlib's
    is_ours = run.kind.value == "bounded"
    chunks = [row.chunk for row in run.rows]
    color, label = (OURS, "kvpolicy session") if is_ours else (STOCK, "stock vLLM")
    ax.plot(chunks, values, color=color, linewidth=1.6, label=label)
    if chunks and run.end.outcome is not Outcome.FINISHED:
        ax.plot(chunks[-1:], values[-1:], "X", color=color, markersize=10, zorder=5)


def _finish(ax: Any, ours: Run, stock: Run | None) -> None:  # noqa: ANN401 - matplotlib's
    """Mark consolidations and the end of stock, and put the legend."""
    consolidated: list[ChunkRow] = [row for row in ours.rows if row.consolidated]
    for i, row in enumerate(consolidated):
        label = "consolidation" if i == 0 else None
        ax.axvline(row.chunk, color=QUIET, linewidth=1, linestyle=":", zorder=0, label=label)
    if _ended(stock):
        ax.axvline(stock.rows[-1].chunk, color=STOCK, linewidth=0.8, linestyle=":", zorder=0)
    ax.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _name_end(ax: Any, stock: Run | None) -> None:  # noqa: ANN401 - matplotlib's
    """Write beside the last point of the stock run that it was the last."""
    if not _ended(stock):
        return
    last = stock.rows[-1]
    word = "dies" if stock.end.outcome is Outcome.DIED else "stops"
    ax.annotate(
        f"stock {word} at chunk {last.chunk + 1}",
        (last.chunk, last.resident_tokens),
        (12, -14),
        textcoords="offset points",
        color=STOCK,
    )


def _ended(run: Run | None) -> TypeGuard[Run]:
    """Return whether a run ended before its stream did, with something to draw."""
    return run is not None and bool(run.rows) and run.end.outcome is not Outcome.FINISHED

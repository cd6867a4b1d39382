"""What a policy would keep of one generation, without an engine: a summary, and a picture of the retained entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from kvpolicy.core.compaction import expand, retained_positions
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.policies import RequestSnapshot, built_in_policies
from kvpolicy.core.policy_options import policy_from
from kvpolicy.core.spaces import LogicalPosition, blocks_for

if TYPE_CHECKING:
    from pathlib import Path

    from kvpolicy.core.policies import KVPolicy

KEPT, GONE, PROMPT = "█", "·", "▒"
_COLOURS = ("#f2f2f2", "#0b6e99", "#9a9a9a")  # gone, kept, prompt
_TITLE_ROOM, _ROW_HEIGHT = 2.4, 0.16


@frozen(kw_only=True)
class Planned:
    """One generation under a policy.

    Attributes:
        lengths: physical length after each stored token.
        retained: the logical positions held at the end, for each (layer, KV head), by KV index.
    """

    policy: KVPolicy
    prompt_length: int
    block_size: int
    num_events: int
    lengths: tuple[int, ...]
    retained: dict[tuple[int, int], tuple[LogicalPosition, ...]]

    @property
    def logical_length(self) -> int:
        """Entries that were stored."""
        return len(self.lengths)


def plan_generation(  # noqa: PLR0913 - the request, and what it is drawn for
    policy_value: str, *, prompt_length: int, length: int, num_layers: int, num_kv_heads: int, block_size: int, key: str
) -> Planned:
    """Return what a policy does to a request of ``length`` tokens, the prompt included.

    Raises:
        PolicyUsageError: there is no such policy, or it cannot serve the request.
    """
    policy = policy_from(policy_value, built_in_policies())
    if policy is None:
        raise PolicyUsageError("policy: expected one that keeps less than everything, got 'off'")
    if length < prompt_length:
        raise PolicyUsageError(f"--length: expected at least {prompt_length} (--prompt), got {length}")
    schedule = policy.schedule(prompt_length, block_size=block_size)
    heads = [(layer, head) for layer in range(num_layers) for head in range(num_kv_heads)]
    retained = {head: [LogicalPosition(i) for i in range(prompt_length)] for head in heads}
    num_events = 0
    lengths = list(range(1, prompt_length + 1))
    for position in range(prompt_length, length):
        if schedule.due_at(num_events) == position:
            event = policy.event_for(
                RequestSnapshot(
                    request_key=key,
                    prompt_length=prompt_length,
                    logical_length=position,
                    physical_length=lengths[-1],
                    num_events=num_events,
                    block_size=block_size,
                )
            )
            if event is not None:
                num_events += 1
                retained = {
                    head: list(retained_positions(event, expand(event, *head), held)) for head, held in retained.items()
                }
        for held in retained.values():
            held.append(LogicalPosition(position))
        lengths.append(len(retained[heads[0]]))
    return Planned(
        policy=policy,
        prompt_length=prompt_length,
        block_size=block_size,
        num_events=num_events,
        lengths=tuple(lengths),
        retained={head: tuple(held) for head, held in retained.items()},
    )


def summary(planned: Planned) -> list[str]:
    """Return what happened, in a few lines."""
    held, stored, size = planned.lengths[-1], planned.logical_length, planned.block_size
    peak = max(planned.lengths)
    return [
        f"{planned.policy}",
        f"{stored} entries stored, {planned.num_events} events, {stored - held} dropped, {held} held per KV head",
        (
            f"at most {peak} held: {blocks_for(peak, size)} blocks of {size}, "
            f"where the dense cache ends with {blocks_for(stored, size)}"
        ),
    ]


def strips(planned: Planned, width: int) -> list[str]:
    """Return one line of ``width`` characters for each KV head: the share of each stretch of positions that is held."""
    lines = []
    for (layer, head), held in planned.retained.items():
        kept = set(held)
        cells = []
        for i in range(width):
            stretch = range(i * planned.logical_length // width, max((i + 1) * planned.logical_length // width, 1))
            share = sum(position in kept for position in stretch) / max(len(stretch), 1)
            is_prompt = len(stretch) > 0 and stretch[-1] < planned.prompt_length
            cells.append(PROMPT if is_prompt else KEPT if share > 1 / 2 else "▄" if share > 1 / 8 else GONE)
        lines.append(f"layer {layer} head {head} {''.join(cells)}")
    return lines


def draw(planned: Planned, folder: Path) -> tuple[Path, ...]:
    """Write ``plan.png`` and ``plan.svg`` into ``folder``: entries held over time, and what each KV head holds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        [
            (2 if position < planned.prompt_length else 1) if position in kept else 0
            for position in range(planned.logical_length)
        ]
        for kept in (set(held) for held in planned.retained.values())
    ]
    figure = Figure(figsize=(10, 2 * _TITLE_ROOM + _ROW_HEIGHT * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[_TITLE_ROOM, _ROW_HEIGHT * len(rows) + 1])
    above.plot(range(1, planned.logical_length + 1), planned.lengths, color=_COLOURS[1], label="held")
    above.plot([1, planned.logical_length], [1, planned.logical_length], color="#c8442c", label="dense", linestyle="--")
    above.set_ylabel("entries per KV head")
    above.legend(frameon=False)
    below.imshow(rows, aspect="auto", interpolation="nearest", cmap=ListedColormap(_COLOURS), vmin=0, vmax=2)
    below.set_yticks(range(len(rows)), [f"{layer}.{head}" for layer, head in planned.retained], fontsize=7)
    below.set_ylabel("layer.KV head")
    below.set_xlabel("logical position (grey: prompt, blue: held at the end)")
    figure.suptitle(str(planned.policy), x=0.01, ha="left", fontsize=11, fontweight="bold")
    paths = tuple(folder / f"plan.{suffix}" for suffix in ("png", "svg"))
    for path in paths:
        figure.savefig(path, dpi=140)
    return paths

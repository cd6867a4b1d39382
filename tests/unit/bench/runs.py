"""Made-up runs: what a session of a few chunks could have given."""

from __future__ import annotations

from typing import Any

from kvpolicy.bench.streams.records import ChunkRow, EngineKind, Outcome, Run, RunEnd, StreamSettings


def row(chunk: int, **more: Any) -> ChunkRow:
    values: dict[str, Any] = {
        "chunk": chunk,
        "ttft_s": 0.1,
        "total_s": 0.5,
        "text_tokens": 48,
        "reply": f"reply {chunk}",
        "reply_tokens": 12,
        "resident_tokens": 70 * chunk,
        "num_blocks": 3 * chunk,
    }
    return ChunkRow(**(values | more))


def run(*rows: ChunkRow, kind: EngineKind = EngineKind.BOUNDED, end: RunEnd | None = None, **more: Any) -> Run:
    values: dict[str, Any] = {"model": "some/model", "num_chunks": max(1, len(rows))}
    return Run(
        kind=kind,
        settings=StreamSettings(**(values | more)),
        rows=tuple(rows),
        end=end or RunEnd(outcome=Outcome.FINISHED),
    )

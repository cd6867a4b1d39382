"""Events: their names, and what a logger gets."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
from attrs.exceptions import FrozenInstanceError

from kvpolicy.core.events import (
    ChunkFolded,
    ChunkRefused,
    Event,
    RangeEvicted,
    SessionClosed,
    SessionConsolidated,
    SessionFailed,
    SessionOpened,
    SessionParked,
    SessionPreempted,
)

TABLE: list[tuple[type[Event], str, dict[str, Any]]] = [
    (SessionOpened, "session.opened", {"num_tokens": 20}),
    (
        ChunkFolded,
        "chunk.folded",
        {"num_tokens": 5, "num_resident_tokens": 50, "num_evicted_tokens": 16},
    ),
    (RangeEvicted, "range.evicted", {"start": 16, "end": 48, "num_blocks": 2}),
    (SessionConsolidated, "session.consolidated", {"num_tokens": 100}),
    (SessionParked, "session.parked", {"num_blocks": 7}),
    (SessionPreempted, "session.preempted", {}),
    (ChunkRefused, "chunk.refused", {"code": "chunk_too_long", "message": "why"}),
    (SessionFailed, "session.failed", {"code": "engine", "message": "why"}),
    (SessionClosed, "session.closed", {"num_chunks": 3}),
]


@pytest.mark.parametrize(("kind", "name", "values"), TABLE)
def test_an_event_gives_its_name_and_values(kind: type[Event], name: str, values: dict[str, Any]) -> None:
    event = kind(request_id="a", **values)
    assert event.name == kind.name == name
    assert event.fields() == {"request_id": "a", **values}
    assert pickle.loads(pickle.dumps(event)) == event  # noqa: S301 - our own


def test_every_event_is_in_this_table_under_its_own_name() -> None:
    assert set(Event.__subclasses__()) >= {kind for kind, _, _ in TABLE}
    names = [kind.name for kind in {kind for kind in Event.__subclasses__() if "name" in vars(kind)}]
    assert sorted(names) == sorted(name for _, name, _ in TABLE)
    assert all(re.fullmatch(r"[a-z_]+\.[a-z_]+", name) for name in names)


def test_an_event_does_not_change() -> None:
    event = SessionPreempted(request_id="a")
    with pytest.raises(FrozenInstanceError):
        event.request_id = "b"  # type: ignore[misc]  # the point

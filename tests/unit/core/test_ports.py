"""The fakes keep the ports' contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvpolicy.core.events import SessionPreempted
from tests.fakes.block_table import FakeBlockTable
from tests.fakes.contracts import check_block_table
from tests.fakes.events import RecordedEvents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpolicy.core.ports import BlockTable, EventSink


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_the_fake_block_table_keeps_the_contract(block_size: int) -> None:
    def make(tokens: Mapping[str, int]) -> BlockTable:
        table = FakeBlockTable(block_size=block_size)
        for request_id, num_tokens in tokens.items():
            table.allocate(request_id, num_tokens)
        return table

    check_block_table(make, block_size=block_size)


def test_a_shared_block_leaves_one_table_and_is_not_counted() -> None:
    table = FakeBlockTable()
    table.allocate("a", 64)
    table.share("b", "a", 2)
    assert table.evict_token_range("a", 16, 48) == (16, 48, 1)
    assert (table.num_blocks("a"), table.num_blocks("b"), table.num_free_blocks()) == (2, 2, 61)
    assert table.evict_token_range("b", 16, 32) == (16, 32, 1)


def test_the_fake_sink_keeps_events_in_order() -> None:
    recorded = RecordedEvents()
    sink: EventSink = recorded
    events = [SessionPreempted(request_id=name) for name in "ab"]
    for event in events:
        sink.emit(event)
    assert recorded.events == events

"""Settings, rows and their way through JSON."""

from __future__ import annotations

import json

import pytest

from kvpolicy.bench.streams.records import ChunkRow, EngineKind, Outcome, RunEnd, StreamSettings, run_to_json
from kvpolicy.core.budget import RetentionBudget
from kvpolicy.core.errors import PolicyUsageError

from .runs import row, run


def test_json_holds_everything_of_a_run() -> None:
    end = RunEnd(outcome=Outcome.DIED, error="EngineDeadError", reason="ValueError: no room")
    original = run(row(1, host_memory_bytes=5), row(2, consolidated=True), kind=EngineKind.STOCK, end=end)
    value = json.loads(json.dumps(run_to_json(original)))

    assert (value["kind"], value["end"]) == ("stock", {"outcome": "died", "error": end.error, "reason": end.reason})
    assert StreamSettings(**value["settings"]) == original.settings
    assert tuple(ChunkRow(**entry) for entry in value["rows"]) == original.rows
    assert value.keys() == {"kind", "settings", "rows", "end", "start_s", "wall_s", "facts"}


def test_settings_name_every_wrong_size_at_once() -> None:
    with pytest.raises(PolicyUsageError) as caught:
        StreamSettings(model="m", num_chunks=0, budget=-1, context=True)

    assert [reason.split(":")[0] for reason in caught.value.reasons] == ["num_chunks", "budget", "context"]


@pytest.mark.parametrize("budget", [512, 1024, 4096])
def test_the_retention_is_one_that_sessions_accept(budget: int) -> None:
    retention = StreamSettings(model="m", budget=budget).retention()

    assert RetentionBudget.from_mapping(retention).total_tokens == budget


def test_both_engines_get_the_limits_that_were_asked_for() -> None:
    arguments = StreamSettings(model="m", context=512, block_size=16, dtype="float32").engine_arguments()

    assert arguments.items() >= {"max_model_len": 512, "block_size": 16, "dtype": "float32"}.items()

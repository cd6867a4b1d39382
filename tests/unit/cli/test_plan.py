"""What ``kvpolicy plan`` shows."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvpolicy.cli.app import app
from kvpolicy.cli.plan import GONE, PROMPT, plan_generation, strips, summary
from kvpolicy.core.errors import PolicyUsageError

POLICY = json.dumps({"type": "randkv", "budget": 64, "buffer_size": 16})


def planned(policy: str = POLICY, *, prompt: int = 20, length: int = 300, block_size: int = 16) -> object:
    return plan_generation(
        policy, prompt_length=prompt, length=length, num_layers=2, num_kv_heads=3, block_size=block_size, key="a"
    )


def test_every_head_holds_the_prompt_the_newest_and_a_sample_of_its_own() -> None:
    plan = plan_generation(POLICY, prompt_length=20, length=300, num_layers=2, num_kv_heads=3, block_size=16, key="a")
    assert len(plan.retained) == 6
    assert len(set(plan.retained.values())) == 6
    for held in plan.retained.values():
        assert set(range(20)) | set(range(284, 300)) <= set(held)
        assert len(held) == len(set(held)) == plan.lengths[-1]
    assert max(plan.lengths) == 96
    assert plan.lengths[:82] == (*range(1, 82), 81)
    assert summary(plan)[1:] == [
        "300 entries stored, 14 events, 209 dropped, 91 held per KV head",
        "at most 96 held: 6 blocks of 16, where the dense cache ends with 19",
    ]


def test_a_strip_is_a_line_for_each_head() -> None:
    plan = plan_generation(
        '{"type": "sink_window", "budget": 64, "buffer_size": 16}',
        prompt_length=30,
        length=300,
        num_layers=1,
        num_kv_heads=2,
        block_size=16,
        key="a",
    )
    lines = strips(plan, 30)
    assert [line[:14] for line in lines] == ["layer 0 head 0", "layer 0 head 1"]
    assert all(line[15:18] == PROMPT * 3 and line[18] == GONE and line[-4:] == "\u2588" * 4 for line in lines)


@pytest.mark.parametrize(
    ("policy", "prompt", "length", "message"),
    [
        ("off", 20, 300, "got 'off'"),
        ("nope", 20, 300, "unknown name"),
        (POLICY, 90, 300, "at most 64"),
        (POLICY, 20, 10, "--length"),
    ],
)
def test_what_cannot_be_planned(policy: str, prompt: int, length: int, message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        planned(policy, prompt=prompt, length=length)


def test_the_command() -> None:
    result = CliRunner().invoke(app, ["plan", POLICY, "--prompt", "20", "--length", "300", "--kv-heads", "3"])
    assert result.exit_code == 0
    assert "14 events" in result.output
    assert result.output.count("layer ") == 6
    refused = CliRunner().invoke(app, ["plan", "nope"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert refused.exit_code == 2
    assert "unknown name 'nope'" in refused.output

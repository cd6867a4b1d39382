"""The limits: their defaults, and every mistake at once."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import fields_dict

from kvpolicy.adapters.http.settings import ServerSettings
from kvpolicy.core.errors import PolicyUsageError


def test_the_defaults() -> None:
    settings = ServerSettings()
    assert settings.max_body_bytes == 8 * 1024 * 1024
    assert settings.max_frame_pixels == 4 * 1024 * 1024
    assert (settings.enqueue_deadline_s, settings.reply_deadline_s, settings.close_deadline_s) == (120, 120, 10)
    assert (settings.idle_timeout_s, settings.reaper_period_s, settings.tombstone_s) == (900, 60, 60)
    assert settings.max_sessions is None
    assert settings.inflight_bytes() == 16 * settings.max_body_bytes
    assert ServerSettings(max_inflight_bytes=2**30).inflight_bytes() == 2**30


@pytest.mark.parametrize("num_bytes", [0, 999, 1.5e9])
def test_the_longest_body_fits_in_what_is_read_at_a_time(num_bytes: int) -> None:
    with pytest.raises(PolicyUsageError, match="max_inflight_bytes: expected an integer >= 1000 or None"):
        ServerSettings(max_body_bytes=1000, max_inflight_bytes=num_bytes)


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(PolicyUsageError) as caught:
        ServerSettings(
            max_body_bytes=0,
            max_frame_pixels=1.5,  # type: ignore[arg-type] # the mistake
            enqueue_deadline_s=float("nan"),
            idle_timeout_s=-1,
            max_sessions=0,
            top_p=0,
            frequency_penalty=3,
        )
    assert caught.value.reasons == (
        "settings.max_body_bytes: expected an integer >= 1, got 0",
        "settings.max_frame_pixels: expected an integer >= 1, got 1.5",
        "settings.max_sessions: expected an integer >= 1 or None, got 0",
        "settings.enqueue_deadline_s: expected seconds > 0, got nan",
        "settings.idle_timeout_s: expected seconds > 0, got -1",
        "settings.top_p: expected a number in (0, 1], got 0",
        "settings.frequency_penalty: expected a number from -2 to 2, got 3",
    )


SECONDS = [name for name in fields_dict(ServerSettings) if name.endswith("_s")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in SECONDS for value in (0, float("inf"))],
        ("temperature", -0.1),
        ("top_p", 1.1),
        ("repetition_penalty", 0),
        ("frequency_penalty", -2.1),
    ],
)
def test_what_is_just_beyond_its_range_is_refused(name: str, value: float) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(PolicyUsageError, match=f"settings.{name}: expected"):
        ServerSettings(**given)


def test_the_edges_of_the_ranges_are_allowed() -> None:
    assert ServerSettings(temperature=0, top_p=1, frequency_penalty=-2).top_p == 1
    assert ServerSettings(frequency_penalty=2, max_tokens=1, max_sessions=1, max_frame_pixels=1).max_tokens == 1

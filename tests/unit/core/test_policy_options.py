"""From what a user writes to a policy, and every mistake in it at once."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
from attrs import frozen

from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.policies import RandKV, RequestSnapshot, SinkWindow, built_in_policies
from kvpolicy.core.policy_options import as_text, policy_from

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpolicy.core.compaction import CompactionEvent
    from kvpolicy.core.policies import KVPolicy, PolicyFactory
    from kvpolicy.core.schedule import EventSchedule

NAMES = "known names: off, randkv, sink_window"


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        (None, None),
        ("off", None),
        ({"type": "off"}, None),
        ('{"type": "off"}', None),
        ("randkv", RandKV()),
        ("sink_window", SinkWindow()),
        ({"type": "randkv"}, RandKV()),
        (
            {"type": "randkv", "budget": 256, "granularity": "block", "seed": 3},
            RandKV(budget=256, granularity="block", seed=3),
        ),
        (' {"type": "sink_window", "buffer_size": 8}\n', SinkWindow(buffer_size=8)),
    ],
)
def test_a_policy_is_a_name_or_a_mapping_or_its_json(value: object, policy: KVPolicy | None) -> None:
    assert policy_from(value, built_in_policies()) == policy


def test_the_mapping_is_left_as_it_is() -> None:
    value = {"type": "randkv", "budget": 8}
    assert policy_from(value, built_in_policies()) == policy_from(value, built_in_policies())
    assert value == {"type": "randkv", "budget": 8}


@pytest.mark.parametrize(
    ("value", "reasons"),
    [
        (3, ["expected a name, a mapping, a JSON object as text, or None, got 3"]),
        (True, ["expected a name, a mapping, a JSON object as text, or None, got True"]),
        (["randkv"], ["expected a name, a mapping, a JSON object as text, or None, got ['randkv']"]),
        ("rand_kv", [f"unknown name 'rand_kv'; {NAMES}"]),
        ("", [f"unknown name ''; {NAMES}"]),
        ("package.module:attribute", [f"unknown name 'package.module:attribute'; {NAMES}"]),
        ({"type": "rand_kv", "budget": 8}, [f"unknown name 'rand_kv'; {NAMES}"]),
        ({"type": None}, [f"type: expected a policy's name, got None; {NAMES}"]),
        ({"type": ["randkv"]}, [f"type: expected a policy's name, got ['randkv']; {NAMES}"]),
        ({}, [f"expected the key 'type' with a policy's name, got no keys; {NAMES}"]),
        ({"name": "randkv", 1: 2}, [f"expected the key 'type' with a policy's name, got 'name', 1; {NAMES}"]),
        ({"type": "off", "budget": 8, "seed": 0}, ["'off' takes no options, got 'budget', 'seed'"]),
        (
            '{"type": "randkv", "budget": 0, "seed": "x", "keep": 1}',
            [
                "policy options: unknown key 'keep'; known keys: budget, buffer_size, seed, granularity",
                "budget: expected an integer >= 1, got 0",
                "seed: expected an integer from 0 to 2**64 - 1, got 'x'",
            ],
        ),
    ],
)
def test_every_mistake_is_reported(value: object, reasons: list[str]) -> None:
    with pytest.raises(PolicyUsageError) as caught:
        policy_from(value, built_in_policies())
    assert caught.value.reasons == tuple(f"kv_cache_policy: {reason}" for reason in reasons)


@pytest.mark.parametrize("text", ['{"type": "randkv"', "{'type': 'randkv'}", '{"a": ' + "9" * 5000])
def test_text_that_is_not_json(text: str) -> None:
    """Nor does a number of thousands of digits get past it: any client may send one."""
    with pytest.raises(PolicyUsageError, match=r"^kv_cache_policy: expected a name or a JSON object, got text that is"):
        policy_from(text, built_in_policies())


@frozen(kw_only=True)
class Never:
    """A third party's policy, which is built from keyword arguments."""

    level: int = 0

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        raise NotImplementedError

    def event_for(self, snapshot: RequestSnapshot) -> CompactionEvent | None:
        raise NotImplementedError


def resolve(name: str) -> PolicyFactory:
    factories: dict[str, Any] = {
        "mine:never": lambda options: Never(**options),
        "mine:nothing": lambda _: None,
        "mine:level": lambda options: Never(level=int(options["level"])),
    }
    if name not in factories:
        raise PolicyUsageError(f"no such module: {name!r}")
    return factories[name]  # type: ignore[no-any-return]  # a wrong one is among them


@pytest.mark.parametrize("value", ["mine:never", {"type": "mine:never", "level": 0}, '{"type": "mine:never"}'])
def test_a_name_with_a_colon_is_resolved(value: object) -> None:
    assert policy_from(value, built_in_policies(), resolve) == Never()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mine:other", "^no such module: 'mine:other'$"),
        ("mine:nothing", r"^kv_cache_policy: 'mine:nothing': expected a policy \(methods .*\), got None$"),
        ({"type": "mine:never", "lvl": 1}, r"'mine:never' does not take the options {'lvl': 1}: .*argument 'lvl'"),
        ({"type": "mine:level", "level": "high"}, "does not take the options {'level': 'high'}: invalid literal"),
        ("never", "unknown name 'never'; known names: off, randkv, sink_window, or package.module:attribute$"),
    ],
)
def test_mistakes_of_third_parties_are_usage_errors(value: object, message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        policy_from(value, built_in_policies(), resolve)


def test_a_registered_policy_is_made_the_same_way() -> None:
    def create(options: Mapping[str, Any]) -> KVPolicy:
        return Never(**options)

    registry = built_in_policies().register("never", create)
    assert policy_from({"type": "never", "level": 2}, registry) == Never(level=2)
    with pytest.raises(PolicyUsageError, match="'never' does not take the options"):
        policy_from({"type": "never", "lvl": 2}, registry)


@pytest.mark.parametrize(
    "value", ["randkv", "off", {"type": "randkv", "budget": 256}, MappingProxyType({"type": "off"})]
)
def test_as_text_says_the_same(value: Any) -> None:
    text = as_text(value)
    assert type(text) is str
    assert policy_from(text, built_in_policies()) == policy_from(value, built_in_policies())


@pytest.mark.parametrize("value", [{"type": "randkv", "budget": object()}, {"type": {1}}])
def test_as_text_needs_what_json_has(value: Any) -> None:
    with pytest.raises(PolicyUsageError, match="kv_cache_policy: expected options that JSON has"):
        as_text(value)


def test_a_mapping_that_is_nested_too_deeply_is_a_users_mistake() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ({"type": "randkv", "budget": deep}, '{"a":' * 100_000):
        with pytest.raises(PolicyUsageError, match="nested too deeply"):
            policy_from(value, built_in_policies())
    while deep:
        deep = deep.pop()

"""Policies, driven as an engine drives them: one appended entry at a time, events as they fall due."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve, frozen
from hypothesis import example, given
from hypothesis import strategies as st

from kvpolicy.core.compaction import CompactionEvent, expand, retained_positions, surviving_blocks
from kvpolicy.core.draws import BlockDraw, RingDraw, UniformDraw
from kvpolicy.core.errors import InvariantError, PolicyUsageError
from kvpolicy.core.philox import key_of
from kvpolicy.core.policies import (
    KVPolicy,
    PolicyRegistry,
    RandKV,
    RequestSnapshot,
    SinkWindow,
    built_in_policies,
    due_event,
)
from kvpolicy.core.schedule import EventSchedule, token_schedule
from kvpolicy.core.spaces import LogicalPosition
from tests.strategies import block_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


BLOCK_SIZE = 4


def snapshot_of(logical: int, physical: int, num_events: int = 0) -> RequestSnapshot:
    """Return what a policy sees of a request with a prompt of 5."""
    return RequestSnapshot(
        request_key="a",
        prompt_length=5,
        logical_length=logical,
        physical_length=physical,
        num_events=num_events,
        block_size=BLOCK_SIZE,
    )


@frozen(kw_only=True)
class Step:
    """A step of a generation: the event before its token, if any, and the positions held before and after."""

    event: CompactionEvent | None
    before: tuple[LogicalPosition, ...]
    after: tuple[LogicalPosition, ...]


def positions(start: int, end: int) -> tuple[LogicalPosition, ...]:
    return tuple(LogicalPosition(position) for position in range(start, end))


def generate(
    policy: KVPolicy,
    prompt: int,
    *,
    head: tuple[int, int] = (0, 0),
    request_key: str = "request",
    block_size: int = BLOCK_SIZE,
) -> Iterator[Step]:
    """Yield the steps of one KV head for ever; each appends an entry after it."""
    held = positions(0, prompt)
    logical, num_events = prompt, 0
    while True:
        event = policy.event_for(
            RequestSnapshot(
                request_key=request_key,
                prompt_length=prompt,
                logical_length=logical,
                physical_length=len(held),
                num_events=num_events,
                block_size=block_size,
            )
        )
        before = held
        if event is not None:
            held = retained_positions(event, expand(event, *head), before)
            num_events += 1
        yield Step(event=event, before=before, after=held)
        held = (*held, LogicalPosition(logical))
        logical += 1


@st.composite
def generations(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw budget, buffer and a prompt that fits."""
    budget = draw(st.integers(1, 16))
    return budget, draw(st.integers(0, 8)), draw(st.integers(1, budget))


kinds = st.sampled_from([RandKV(), RandKV(granularity="shared", seed=5), SinkWindow()])


@given(kinds, generations())
@example(RandKV(), (1, 0, 1))
@example(SinkWindow(), (1, 0, 1))
@example(SinkWindow(), (4, 0, 4))
@example(RandKV(), (8, 3, 1))
@example(RandKV(), (8, 3, 8))
def test_what_every_policy_keeps(kind: RandKV | SinkWindow, generation: tuple[int, int, int]) -> None:
    budget, buffer_size, prompt = generation
    policy = evolve(kind, budget=budget, buffer_size=buffer_size)
    schedule = policy.schedule(prompt, block_size=BLOCK_SIZE)
    assert schedule == token_schedule(budget=budget, buffer_size=buffer_size, prompt_length=prompt)
    steps = list(islice(generate(policy, prompt), 80))
    assert max(len(step.before) for step in steps) == schedule.peak == budget + max(2 * buffer_size, 1)
    ordinals = [step.event.ordinal for step in steps if step.event is not None]
    assert ordinals == list(range(schedule.events_due_by(prompt + 79)))
    for logical, step in enumerate(steps, prompt):
        assert len(step.after) == schedule.physical_length(logical)
        assert len(set(step.after)) == len(step.after)
        assert set(step.after) <= set(step.before)
        assert step.after[:prompt] == tuple(range(prompt))
        if step.event is not None:
            assert len(step.after) == budget + buffer_size
            assert set(step.after) >= set(range(logical - buffer_size, logical))
        else:
            assert step.after == step.before


@given(generations(), block_sizes)
@example((1, 0, 1), 16)
@example((8, 4, 8), 4)
@example((9, 3, 7), 4)
@example((7, 4, 7), 1)
def test_what_the_block_form_keeps(generation: tuple[int, int, int], block_size: int) -> None:
    """At least K + r stay, at most K + r + 2 x block size - 1 are held; what is left is in whole blocks, in order."""
    budget, buffer_size, prompt = generation
    policy = RandKV(budget=budget, buffer_size=buffer_size, granularity="block")
    schedule = policy.schedule(prompt, block_size=block_size)
    num_steps = schedule.due_at(4) - prompt + 1
    steps = list(islice(generate(policy, prompt, block_size=block_size), num_steps))
    assert max(len(step.before) for step in steps) == schedule.peak <= budget + buffer_size + 2 * block_size - 1
    fired = [(logical, step) for logical, step in enumerate(steps, prompt) if step.event is not None]
    assert len(fired) == 5
    for logical, step in fired:
        assert step.event is not None
        assert step.event.draw == BlockDraw(block_size)
        assert budget + buffer_size <= len(step.after) == len(step.before) - block_size
        assert step.after[:prompt] == tuple(range(prompt))
        assert set(step.after) >= set(range(logical - buffer_size, logical))
        table = [step.before[start : start + block_size] for start in range(0, len(step.before), block_size)]
        stay = [table[block] for block in surviving_blocks(step.event, block_size)]
        assert step.after == tuple(position for block in stay for position in block)


@pytest.mark.parametrize(
    ("budget", "prompt", "due"),
    [
        (8, 5, [16, 20, 24]),  # a multiple of the block size
        (9, 5, [17, 21, 25]),  # no multiple
        (8, 8, [16, 20, 24]),  # the first generated block begins with the first generated entry
        (7, 7, [16, 20, 24]),  # and here it ends later than the budget asks
        (1, 1, [12, 16, 20]),  # K = 1: block 1, cells 4 to 7, is the first that is wholly generated
    ],
)
def test_events_of_the_block_form(budget: int, prompt: int, due: list[int]) -> None:
    policy = RandKV(budget=budget, buffer_size=4, granularity="block")
    steps = enumerate(islice(generate(policy, prompt), due[-1] - prompt + 1), prompt)
    assert [logical for logical, step in steps if step.event is not None] == due


@given(generations())
@example((1, 0, 1))
@example((4, 0, 4))
@example((8, 4, 5))
def test_the_window_is_the_newest_entries_through_every_wrap(generation: tuple[int, int, int]) -> None:
    budget, buffer_size, prompt = generation
    policy = SinkWindow(budget=budget, buffer_size=buffer_size)
    for logical, step in enumerate(islice(generate(policy, prompt), 90), prompt):
        if step.event is not None:
            newest = range(logical - (budget + buffer_size - prompt), logical)
            assert sorted(step.after) == [*range(prompt), *newest]


def test_the_starts_of_the_ring() -> None:
    events = [step.event for step in islice(generate(SinkWindow(budget=8, buffer_size=4), 5), 24) if step.event]
    assert [event.draw for event in events] == [RingDraw(0), RingDraw(1), RingDraw(5), RingDraw(2)]


def test_an_event_of_randkv() -> None:
    policy = RandKV(budget=8, buffer_size=4, seed=3, granularity="shared")
    events = [step.event for step in islice(generate(policy, 5), 13) if step.event is not None]
    assert events == [
        CompactionEvent(
            key=key_of(3, "request"),
            ordinal=ordinal,
            prompt_length=5,
            physical_length=physical_length,
            num_dropped=num_dropped,
            num_protected=4,
            draw=UniformDraw(is_shared=True),
        )
        for ordinal, physical_length, num_dropped in [(0, 13, 1), (1, 16, 4)]
    ]


def sets_of(policy: KVPolicy, head: tuple[int, int], request_key: str = "request") -> list[tuple[int, ...]]:
    """Return the retained positions after each of a request's events."""
    steps = islice(generate(policy, 3, head=head, request_key=request_key), 60)
    return [step.after for step in steps if step.event is not None]


def test_sets_follow_from_seed_request_layer_and_head_alone() -> None:
    """Alone, or interleaved with others: the same; any of the four changed: others."""
    policy = RandKV(budget=12, buffer_size=4)
    alone = sets_of(policy, (2, 1))
    interleaved = [generate(policy, 3, head=(2, 1), request_key=key) for key in ("other", "request", "third")]
    rounds = [[next(request) for request in interleaved] for _ in range(60)]
    assert [steps[1].after for steps in rounds if steps[1].event is not None] == alone
    others = [
        sets_of(policy, (2, 0)),
        sets_of(policy, (0, 1)),
        sets_of(policy, (2, 1), "other"),
        sets_of(evolve(policy, seed=1), (2, 1)),
    ]
    assert all(sets[-1] != alone[-1] for sets in others)
    for granularity in ("shared", "block"):
        shared = evolve(policy, granularity=granularity)
        assert sets_of(shared, (2, 1)) == sets_of(shared, (0, 0))


def digest_of_sets() -> str:
    """Return all sets of a request in a model of two layers and four KV heads, in one line."""
    policies = [RandKV(budget=12, buffer_size=4, granularity=name) for name in ("head", "shared", "block")]
    heads = [(layer, kv_head) for layer in range(2) for kv_head in range(4)]
    sets = {(policy.granularity, head): sets_of(policy, head) for policy in policies for head in heads}
    return blake2b(repr(sets).encode(), digest_size=16).hexdigest()


@pytest.mark.parametrize("hash_seed", ["0", "77"])
def test_a_fresh_process_makes_the_same_sets(hash_seed: str) -> None:
    """Nothing hangs on the process: neither Python's hashes of strings, which change with it, nor what ran before."""
    root = Path(__file__).parents[3]
    code = "from tests.unit.core.test_policies import digest_of_sets; print(digest_of_sets())"
    done = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == digest_of_sets()


def test_two_ranks_with_half_of_the_heads_each_make_the_sets_of_one() -> None:
    """A rank knows its own heads by number; the plan is asked for by the number in the whole model."""
    policy, num_heads = RandKV(budget=12, buffer_size=4), 4
    whole = [sets_of(policy, (1, kv_head)) for kv_head in range(num_heads)]
    split = [sets_of(policy, (1, rank * num_heads // 2 + own)) for rank in range(2) for own in range(num_heads // 2)]
    assert split == whole
    assert len({tuple(sets) for sets in whole}) == num_heads


def test_a_replay_gives_the_same_events() -> None:
    """A preempted request starts again from its prompt and passes the same lengths."""
    policy = RandKV(budget=12, buffer_size=4)
    first, again = (list(islice(generate(policy, 3), length)) for length in (37, 60))
    assert again[:37] == first


# The 0.999 quantile of chi-square for 4 degrees of freedom. Seeds are fixed, so this passes always or never.
@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize(("budget", "buffer_size", "prompt"), [(12, 4, 4), (4, 1, 1), (6, 6, 2)])
def test_survival_is_a_power_of_the_share_that_stays(budget: int, buffer_size: int, prompt: int, which: int) -> None:
    """One candidate of event 1 (the first cell, the last cell) in many independent heads: how many events it survives.

    Expected is (1 - f) f^n for n = 0 to 3, and f^4 for more, with f = (K - prompt) / (K + r - prompt).
    """
    policy = RandKV(budget=budget, buffer_size=buffer_size)
    share, num_heads = (budget - prompt) / (budget + buffer_size - prompt), 400
    schedule = policy.schedule(prompt, block_size=BLOCK_SIZE)
    steps = islice(generate(policy, prompt), schedule.due_at(4) - prompt + 1)
    first, *later = (step.event for step in steps if step.event is not None)
    counts = [0] * 5
    for kv_head in range(num_heads):
        held = retained_positions(first, expand(first, 0, kv_head), positions(0, first.physical_length))
        sets: list[tuple[LogicalPosition, ...]] = []
        for event in later:
            end = schedule.due_at(event.ordinal)
            held += positions(end - schedule.interval, end)
            sets.append(held)
            held = retained_positions(event, expand(event, 0, kv_head), held)
        chosen = sets[0][prompt : later[0].candidates.end][which]
        counts[sum(chosen in after for after in [*sets[1:], held])] += 1
    expected = [num_heads * (1 - share) * share**n for n in range(4)] + [num_heads * share**4]
    assert sum((count - wanted) ** 2 / wanted for count, wanted in zip(counts, expected, strict=True)) < 18.47


def test_a_generation_that_ends_exactly_at_an_event() -> None:
    """The last entry makes it due: the event is there for who goes on, and the length before is the peak."""
    *_, last = islice(generate(RandKV(budget=8, buffer_size=4), 5), 17 - 5 + 1)
    assert last.event is not None
    assert (len(last.before), len(last.after)) == (16, 12)


def test_a_budget_beyond_the_context_never_fires() -> None:
    assert not any(step.event for step in islice(generate(RandKV(budget=60, buffer_size=4), 3), 61))


@pytest.mark.parametrize("policy", [RandKV(budget=8), RandKV(budget=8, granularity="block"), SinkWindow(budget=8)])
def test_a_prompt_beyond_the_budget_is_rejected_with_both_numbers(policy: KVPolicy) -> None:
    with pytest.raises(PolicyUsageError, match=r"prompt: expected at most 8 tokens \(budget\), got 9"):
        next(generate(policy, 9))


@pytest.mark.parametrize(
    ("logical", "physical", "num_events", "message"),
    [
        (14, 14, 0, "snapshot.num_events: expected 1 at logical length 14, got 0"),
        (17, 13, 3, "snapshot.num_events: expected 2 at logical length 17, got 3"),
        (17, 17, 0, "snapshot.num_events: expected 2 at logical length 17, got 0"),
        (13, 12, 0, "snapshot.physical_length: expected 13 at logical length 13 after 0 events, got 12"),
        (15, 15, 1, "snapshot.physical_length: expected 14 at logical length 15 after 1 events, got 15"),
    ],
)
def test_an_event_left_out_is_an_error(logical: int, physical: int, num_events: int, message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        RandKV(budget=8, buffer_size=4).event_for(snapshot_of(logical, physical, num_events))


def test_an_event_is_due_once() -> None:
    """Asked again at the same length, after the event: none."""
    assert RandKV(budget=8, buffer_size=4).event_for(snapshot_of(13, 12, 1)) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"request_key": 3}, "snapshot.request_key: expected str, got 3"),
        ({"prompt_length": 0}, "snapshot.prompt_length: expected an integer >= 1, got 0"),
        ({"physical_length": -1}, "snapshot.physical_length: expected an integer >= 0, got -1"),
        ({"block_size": 0}, "snapshot.block_size: expected an integer >= 1, got 0"),
        ({"num_events": -1}, "snapshot.num_events: expected an integer >= 0, got -1"),
        ({"logical_length": 8}, r"snapshot.logical_length: expected an integer >= 9 \(physical_length\), got 8"),
    ],
)
def test_an_impossible_snapshot_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        evolve(snapshot_of(9, 9), **values)


def test_defaults() -> None:
    assert built_in_policies().create("randkv") == RandKV(budget=2048, buffer_size=64, seed=0, granularity="head")
    assert built_in_policies().create("sink_window") == SinkWindow(budget=2048, buffer_size=64)


def test_everything_wrong_with_the_options_is_reported_at_once() -> None:
    options = {"budget": 0, "buffer_size": "4", "seed": -1, "granularity": "entry", "keep": 3}
    with pytest.raises(PolicyUsageError) as caught:
        built_in_policies().create("randkv", options)
    assert caught.value.reasons == (
        "policy options: unknown key 'keep'; known keys: budget, buffer_size, seed, granularity",
        "budget: expected an integer >= 1, got 0",
        "buffer_size: expected an integer >= 0, got '4'",
        "seed: expected an integer from 0 to 2**64 - 1, got -1",
        "granularity: expected one of head, shared, block, got 'entry'",
    )
    with pytest.raises(PolicyUsageError, match=r"unknown key 'seed'; known keys: budget, buffer_size$"):
        SinkWindow.from_mapping({"seed": 0})
    options_of_no_kind: Any = [1]
    with pytest.raises(PolicyUsageError, match=r"policy options: expected Mapping, got \[1\]"):
        RandKV.from_mapping(options_of_no_kind)


@pytest.mark.parametrize("name", ["rand_kv", "", None, ["randkv"]])
def test_an_unknown_name_lists_those_that_exist(name: Any) -> None:
    with pytest.raises(PolicyUsageError, match=r"known policies: randkv, sink_window$"):
        built_in_policies().create(name)
    with pytest.raises(PolicyUsageError, match=r"known policies: none$"):
        PolicyRegistry().create(name)


def test_a_name_is_registered_once() -> None:
    registry = built_in_policies()
    with pytest.raises(PolicyUsageError, match="'randkv': already registered; known policies: randkv, sink_window"):
        registry.register("randkv", RandKV.from_mapping)


@pytest.mark.parametrize("name", ["off", "package.module:attribute"])
def test_names_with_a_meaning_of_their_own_are_not_registered(name: str) -> None:
    with pytest.raises(PolicyUsageError, match=f"expected a name without a colon and other than 'off', got '{name}'"):
        built_in_policies().register(name, RandKV.from_mapping)


@frozen
class EveryOther:
    """A third party's policy: it drops half of the generated entries whenever there are 20 of them."""

    def schedule(self, prompt_length: int, *, block_size: int) -> EventSchedule:
        assert block_size == BLOCK_SIZE
        return EventSchedule(first_due=prompt_length + 20, interval=10, first_dropped=10)

    def event_for(self, snapshot: RequestSnapshot) -> CompactionEvent | None:
        schedule = self.schedule(snapshot.prompt_length, block_size=snapshot.block_size)
        return due_event(schedule, snapshot, draw=UniformDraw(), num_protected=2)


def test_a_third_party_adds_its_own() -> None:
    def create(options: Mapping[str, Any]) -> KVPolicy:
        assert options == MappingProxyType({})
        return EveryOther()

    registry = built_in_policies().register("every_other", create)
    assert registry.names == ("every_other", "randkv", "sink_window")
    assert built_in_policies().names == ("randkv", "sink_window")
    steps = list(islice(generate(registry.create("every_other"), 4), 60))
    assert max(len(step.before) for step in steps) == 24
    assert {len(step.after) for step in steps if step.event is not None} == {14}

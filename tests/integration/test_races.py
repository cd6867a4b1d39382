"""Every way a session can end, at a random moment of everything it can be doing, on the live engine.

After each trial nothing is left of it anywhere, a session beside it has not noticed, and the next one works. The delays
are random; what they race with is the engine's own process. ``KVPOLICY_RACE_SEED`` sets the seed, which is printed, and
which every failure names; ``-m long`` runs ten times as many.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define

from kvpolicy.adapters.vllm import AsyncLLM
from kvpolicy.core.errors import SessionClosedError, SessionFailedError
from tests.integration.live import PATIENCE_S, LiveSession, LiveStream, core_state, engine_options, exact, ordinary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEED = int(os.environ.get("KVPOLICY_RACE_SEED", "0"))
HOWS = ["abort", "close", "disconnect", "timeout", "producer cancelled", "producer fails"]
STATES = ["queued", "prefill", "decoding", "between chunks", "consolidating", "parked", "preempted"]
NUM_TRIALS = 12  # of each pair: 504 in all
NUM_SLOTS = 4
NUM_BLOCKS = 120
WINDOW = {"total_tokens": 192, "min_total_tokens": 64}
# What a trial wants to meet (see ``moment``); a trial's own moment is random, so it may come just before or after.
EXPECTED = {
    "queued": {"QUEUED"},
    "prefill": {"PREFILLING"},
    "decoding": {"REPLYING"},
    "between chunks": {"IDLE"},
    "consolidating": {"CONSOLIDATING"},
    "parked": {"PARKED"},
    "preempted": {"PREEMPTED"},
}


@define
class World:
    """The engine, the session that lives beside all trials, and what was seen."""

    engine: AsyncLLM
    neighbour: LiveStream
    consolidates_after: int
    tasks: set[Any]
    num_trials: int = 0
    failed: str | None = None


@pytest.fixture(scope="module")
def world(runner: asyncio.Runner, short_range_model: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nKVPOLICY_RACE_SEED={SEED}")
    # To send the function that looks into the scheduler.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        world = runner.run(start(short_range_model))
        yield world
        runner.run(world.neighbour.close())
        world.engine.shutdown()


async def start(model: Path) -> World:
    engine = AsyncLLM(
        **engine_options(
            model,
            max_num_seqs=NUM_SLOTS,
            max_num_batched_tokens=32,
            num_gpu_blocks_override=NUM_BLOCKS + 1,
        )
    )
    rehearsal = LiveStream(engine, "rehearsal", retention=WINDOW)
    num_chunks = 0
    while "CONSOLIDATING" not in (await look(engine))["states"].values():
        await rehearsal.push(content(num_chunks))
        num_chunks += 1
        assert num_chunks < 40, "no consolidation"
    await rehearsal.close()
    neighbour = LiveStream(engine, "neighbour", retention=WINDOW)
    await neighbour.push([9] * 20)
    await ordinary(engine, [5, 6])
    return World(engine, neighbour, num_chunks, asyncio.all_tasks())


async def look(engine: AsyncLLM) -> dict[str, Any]:
    (state,) = await asyncio.wait_for(engine.collective_rpc(core_state), PATIENCE_S)
    return dict(state)


def moment(state: dict[str, Any], name: str) -> str | None:
    """Return what a look has met a session in: the scheduler's word for it, but one for each reason to prefill."""
    request_id = next((request_id for request_id in state["states"] if request_id.startswith(f"{name}-")), None)
    if request_id is None:
        return None
    met = str(state["states"][request_id])
    if met != "PREFILLING":
        return met
    if request_id in state["preempted"]:
        return "PREEMPTED"
    return met if request_id in state["running"] else "QUEUED"


def content(number: int, size: int = 40) -> list[int]:
    return [5 + (7 * number + i) % 300 for i in range(size)]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("how", HOWS)
def test_every_end_in_every_state(world: World, runner: asyncio.Runner, how: str, state: str) -> None:
    runner.run(run_trials(world, how, state, NUM_TRIALS))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("how", HOWS)
def test_every_end_in_every_state_many_times(world: World, runner: asyncio.Runner, how: str, state: str) -> None:
    runner.run(run_trials(world, how, state, 120))


async def run_trials(world: World, how: str, state: str, num_trials: int) -> None:
    assert world.failed is None, f"what trial {world.failed} has left behind is still there"
    seen: list[str | None] = []
    # Which moment a trial meets is a matter of luck: a few more where none of so many has met the right one.
    for i in range(10 * num_trials):
        if i >= num_trials and EXPECTED[state] & set(seen):
            break
        seed = f"{SEED}/{how}/{state}/{i}"
        try:
            async with asyncio.timeout(3 * PATIENCE_S):
                seen.append(await trial(world, how, state, random.Random(seed)))
        except BaseException as error:
            world.failed = seed
            error.add_note(f"seed {seed} (KVPOLICY_RACE_SEED={SEED})")
            raise
        world.num_trials += 1
    print(f"{how} / {state}: {len(seen)} trials, met {dict(Counter(seen))}")
    assert EXPECTED[state] & set(seen), f"no trial met the state it was made for: {seen}"


async def trial(world: World, how: str, state: str, dice: random.Random) -> str | None:
    """Bring a session into a state, end it after a random delay, and see that nothing is left; return what was met."""
    engine = world.engine
    through_facade = how == "timeout" or (how in {"abort", "close"} and dice.random() < 0.5)
    stream: LiveStream | LiveSession = (
        LiveSession(engine, retention=WINDOW)
        if through_facade
        else LiveStream(engine, f"trial-{world.num_trials}", retention=WINDOW)
    )
    blockers = await bring_to(world, stream, state, dice)
    met = None
    await asyncio.sleep(dice.choice([0, 0, dice.random() * 0.004, dice.random() * 0.02]))
    if dice.random() < 0.5:
        met = moment(await look(engine), stream.id)
        await asyncio.sleep(dice.random() * 0.002)
    if isinstance(stream, LiveSession):
        await end_session(world, stream, how, blockers, dice)
    else:
        await end_stream(world, stream, how, walks_away=bool(blockers) is False and dice.random() < 0.5, dice=dice)
    for blocker in blockers:
        blocker.cancel()
    await asyncio.gather(*blockers, return_exceptions=True)
    await nothing_is_left(world)
    return met


async def bring_to(
    world: World, stream: LiveStream | LiveSession, state: str, dice: random.Random
) -> list[asyncio.Task[Any]]:
    """Bring a session about to a state; in every one but "queued" it has evicted. Return what holds the slots."""
    engine = world.engine
    if state == "queued":
        if dice.random() < 0.5:
            await stream.push(content(0))
            await engine.reset_prefix_cache(reset_running_requests=True)
        blockers = [asyncio.create_task(ordinary(engine, [5 + i] * 10, 400)) for i in range(NUM_SLOTS + 1)]
        await asyncio.sleep(0.02)
        stream.send(content(1))
        return blockers
    num_chunks = world.consolidates_after if state == "consolidating" else dice.randint(6, 8)
    for number in range(num_chunks):
        await stream.push(content(number))
    if state == "prefill":
        stream.send(content(9, 80))
    elif state in {"decoding", "preempted"}:
        stream.send(content(9), max_tokens=30)
        await stream.next_piece()
        if isinstance(stream, LiveStream) and dice.random() < 0.3:
            stream.send(content(10))
    if state in {"parked", "preempted"}:
        await engine.reset_prefix_cache(reset_running_requests=True)
    return []


async def end_session(
    world: World, live: LiveSession, how: str, blockers: list[asyncio.Task[Any]], dice: random.Random
) -> None:
    """End a session of the facade; a pending push is told, and closing always works."""
    async with asyncio.timeout(PATIENCE_S):
        if how == "timeout":
            await time_out(live, dice)
            for blocker in blockers:
                blocker.cancel()
            # The reply that nobody waits for comes all the same, and the session goes on.
            while live.session._pending is not None:
                await asyncio.sleep(0.001)
            assert len(await live.push([7] * 5)) == 2
        if how == "abort":
            # As in stock vLLM, an abort of what the engine has not been asked for yet does nothing.
            while live.id not in {stream.request_id for stream in world.engine._streams.values()}:
                await asyncio.sleep(0)
            await world.engine.abort(live.id)
            with pytest.raises((SessionFailedError, SessionClosedError)):
                await (live.pending if live.pending is not None and not live.pending.done() else push(live))
        await live.session.close()
        if live.pending is not None:
            await asyncio.gather(live.pending, return_exceptions=True)
        with pytest.raises((SessionFailedError, SessionClosedError)):
            await push(live)


async def time_out(live: LiveSession, dice: random.Random) -> None:
    """Stop waiting for the pending push, or for a new one, after a moment."""
    if live.pending is None or live.pending.done():
        live.send(content(11))
    assert live.pending is not None
    with suppress(TimeoutError):
        await asyncio.wait_for(live.pending, dice.choice([0, 0.001, dice.random() * 0.01]))


async def push(live: LiveSession) -> None:
    """Push until the session says that it has ended: an abort takes a moment to come round."""
    while True:
        await live.push([7] * 5)


async def end_stream(world: World, stream: LiveStream, how: str, *, walks_away: bool, dice: random.Random) -> None:
    """End a stream, and see that its consumer is told as it should be."""
    async with asyncio.timeout(PATIENCE_S):
        if how == "abort":
            await world.engine.abort(stream.id)
            await stream.consumer
        elif how == "close":
            stream.end()
            await stream.consumer
            assert all(reason == "length" for _, reason in stream.replies)
        elif how == "disconnect":
            await disconnect(stream, walks_away=walks_away, dice=dice)
        elif how == "producer cancelled":
            while stream.waiting is None or stream.waiting.done():  # it takes chunks at its own pace
                await asyncio.sleep(0)
            stream.waiting.cancel()
            with pytest.raises(SessionFailedError, match="input_cancelled"):
                await stream.consumer
        elif how == "producer fails":
            stream.fail(KeyError("mine"))
            with pytest.raises(KeyError, match="mine"):
                await stream.consumer


async def disconnect(stream: LiveStream, *, walks_away: bool, dice: random.Random) -> None:
    """Stop reading: cancelled while it waits, or it just leaves after a piece and closes (or forgets) the generator."""
    if not walks_away:
        stream.consumer.cancel()
        with suppress(asyncio.CancelledError):
            await stream.consumer
        return
    stream.walks_away = True
    stream.send(content(11))
    await stream.consumer
    if dice.random() < 0.5:
        await stream.outputs.aclose()
    stream.outputs = None
    gc.collect()


async def nothing_is_left(world: World) -> None:
    """Front end, scheduler, worker and loop hold nothing but the neighbour; it goes on, and a new session works."""
    engine = world.engine
    assert len(await world.neighbour.push([9] * 20)) == 2
    assert len(await ordinary(engine, [5, 6])) == 4
    async with engine.open_session(retention=WINDOW, sampling_params=exact(3)) as session:
        assert len((await session.push([7] * 30)).token_ids) == 3
    async with asyncio.timeout(PATIENCE_S):
        while asyncio.all_tasks() - world.tasks - {asyncio.current_task(), world.neighbour.waiting}:
            await asyncio.sleep(0.001)
        while (state := await look(engine))["running"]:
            await asyncio.sleep(0.001)  # the neighbour consolidates
    processor = engine.output_processor
    (neighbour,) = processor.request_states
    assert [neighbour] == [*itertools.chain(*processor.external_req_ids.values())] == state["requests"]
    assert len(engine._streams) == 1
    is_idle = state["states"] == {neighbour: "IDLE"}
    assert is_idle or state["states"] == {neighbour: "PARKED"}
    assert state["skipped"] == [neighbour] * is_idle
    assert state["waiting"] == []
    assert state["num_idle"] == is_idle
    assert state["unsent"] == 0
    assert state["free"] == NUM_BLOCKS - state["num_blocks"].get(neighbour, 0)
    assert set(state["num_blocks"]) <= {neighbour}
    # A worker hears of an end with the next step, so the last session may still be there.
    assert not [name for name in state["runner"] if name != neighbour and not name.startswith(session.id)]

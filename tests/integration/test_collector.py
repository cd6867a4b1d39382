"""The queue in front of a stream's consumer, vLLM's beside ours: replies stay apart however slow the consumer is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm.outputs import STREAM_FINISHED, CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from kvpolicy.adapters.vllm.v0_28.frontend.boundary_collector import MAX_OPEN_CHUNKS, BoundaryCollector


def only_ours_passes(reason: str, *, raises: Any = AssertionError) -> list[object]:
    fails = pytest.mark.xfail(reason=reason, raises=raises, strict=True)
    stock = pytest.param(RequestOutputCollector, marks=fails, id="stock")
    return [stock, pytest.param(BoundaryCollector, id="ours")]


def piece(*token_ids: int, finish: str | None = None) -> RequestOutput:
    completion = CompletionOutput(
        index=0,
        text="".join(map(str, token_ids)),
        token_ids=list(token_ids),
        cumulative_logprob=None,
        logprobs=None,
        finish_reason=finish,
    )
    return RequestOutput("a", None, [1], None, [completion], finished=False)


def drain(queue: Any) -> list[tuple[list[int], str | None]]:
    read = []
    while (output := queue.get_nowait()) is not None:
        read.append((list(output.outputs[0].token_ids), output.outputs[0].finish_reason))
    return read


@pytest.mark.parametrize("kind", only_ours_passes("it merges whatever nobody has read"))
def test_replies_are_never_merged(kind: Any) -> None:
    queue = kind(RequestOutputKind.DELTA, "a")
    for output in (piece(1), piece(2, finish="length"), piece(3), piece(4), piece(5, finish="stop"), piece(6)):
        queue.put(output)
    assert drain(queue) == [([1, 2], "length"), ([3, 4, 5], "stop"), ([6], None)]
    assert not queue.ready.is_set()


@pytest.mark.parametrize("kind", only_ours_passes("it keeps the newest output only, be it of the next reply"))
def test_of_a_cumulative_reply_the_newest_output_is_kept(kind: Any) -> None:
    queue = kind(RequestOutputKind.CUMULATIVE, "a")
    for output in (piece(1), piece(1, 2), piece(1, 2, 3, finish="length"), piece(4), piece(4, 5)):
        queue.put(output)
    assert drain(queue) == [([1, 2, 3], "length"), ([4, 5], None)]


@pytest.mark.parametrize(
    "kind",
    only_ours_passes(
        "an exception takes the place of what nobody has read",
        raises=pytest.RaisesExc(ValueError, match="the stream's own"),
    ),
)
def test_an_exception_overtakes_nothing(kind: Any) -> None:
    queue = kind(RequestOutputKind.DELTA, "a")
    queue.put(piece(1, finish="length"))
    queue.put(ValueError("the stream's own"))
    assert queue.get_nowait().outputs[0].token_ids == [1]
    with pytest.raises(ValueError, match="own"):
        queue.get_nowait()
    assert queue.get_nowait() is None


@pytest.mark.parametrize("kind", only_ours_passes("it writes into the end marker that all streams share"))
def test_the_shared_end_marker_is_left_alone(kind: Any) -> None:
    before = list(STREAM_FINISHED.outputs)
    try:
        queue = kind(RequestOutputKind.DELTA, "a")
        queue.put(STREAM_FINISHED)
        queue.put(piece(1))
        assert queue.get_nowait() is STREAM_FINISHED
        assert STREAM_FINISHED.outputs == before
    finally:
        STREAM_FINISHED.outputs[:] = before


def test_so_many_chunks_are_on_their_way_or_unread_and_no_more() -> None:
    async def run() -> None:
        queue = BoundaryCollector(RequestOutputKind.DELTA, "a")
        for num_chunks in range(MAX_OPEN_CHUNKS):
            await asyncio.wait_for(queue.room(num_chunks), 1)  # none is answered yet
        for i in range(MAX_OPEN_CHUNKS):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(queue.room(MAX_OPEN_CHUNKS), 0.01)
            queue.put(piece(i))
            queue.put(piece(i, finish="length"))  # answered, and not read
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.room(MAX_OPEN_CHUNKS), 0.01)
        assert (await queue.get()).outputs[0].token_ids == [0, 0]
        await asyncio.wait_for(queue.room(MAX_OPEN_CHUNKS), 1)
        assert len(drain(queue)) == MAX_OPEN_CHUNKS - 1
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.put(piece(9))
        assert (await waiting).outputs[0].token_ids == [9]

    asyncio.run(run())

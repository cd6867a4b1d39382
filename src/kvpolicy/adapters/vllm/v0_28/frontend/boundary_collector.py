"""The queue between vLLM's output handler and the consumer of a stream, in which replies stay apart."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine.output_processor import RequestOutputCollector

from kvpolicy.adapters.vllm.shared.messages import ChunkReport

# Chunks of a stream that may be on their way, or answered and unread, before no further one is taken from it.
MAX_OPEN_CHUNKS = 8
# How long an abort waits for a stream to clean up, in seconds.
PATIENCE_S = 2.0


class BoundaryCollector(RequestOutputCollector):
    """The stock collector, but what belongs to two chunks is never merged, and nothing is overwritten.

    Pieces of one reply are merged while nobody reads them, as in the stock class. An exception comes after the outputs
    that were there before it.
    """

    def __init__(self, output_kind: Any, request_id: str = "") -> None:
        """Make an empty queue."""
        super().__init__(output_kind, request_id)
        self._unread: deque[Any] = deque()
        self._num_boundaries = 0
        self._num_read = 0
        # Set when one of the two has grown.
        self._progress = asyncio.Event()
        # What the scheduler said with the last boundary, None before the first.
        self.last_report: ChunkReport | None = None

    def adopt(self, queue: RequestOutputCollector) -> Any:
        """Take another queue's place before the consumer; return the task that feeds the stream."""
        self.request_id = queue.request_id
        task = self._input_stream_task = queue._input_stream_task  # noqa: SLF001 - of the class that this one extends
        collector = weakref.ref(self)
        task.add_done_callback(lambda _: _forget_input(collector))
        return task

    async def stop_input(self, caller: asyncio.Task[Any] | None) -> None:
        """Cancel the task that feeds the stream, and wait until it has ended (unless it is the one that asks for it).

        A stream that does not let itself be cancelled is not waited for any longer than ``PATIENCE_S``.
        """
        task = self._input_stream_task
        if task is not None and task is not caller:
            task.cancel()
            await asyncio.wait({task}, timeout=PATIENCE_S)

    def let_input_be(self) -> None:
        """Let the task that feeds the stream end by itself: it has nothing left to do but to send the end.

        Stock vLLM does so too; who closes the queue would otherwise cancel that message.
        """
        self._input_stream_task = None

    def put(self, output: Any) -> None:
        """Add an output or an exception, without waiting."""
        last = self._unread[-1] if self._unread else None
        if isinstance(last, RequestOutput) and isinstance(output, RequestOutput) and not _is_boundary(last):
            last.add(output, aggregate=self.aggregate)
        else:
            self._unread.append(output)
        self.ready.set()
        if isinstance(output, RequestOutput) and _is_boundary(output):
            self._num_boundaries += 1
            self._progress.set()
            self.last_report = ChunkReport.from_wire(output.kv_transfer_params) or self.last_report

    async def get(self) -> Any:
        """Return the oldest output, or raise the exception that is in its place; wait if there is none."""
        while not self._unread:
            await self.ready.wait()
        return self._take()

    def get_nowait(self) -> Any:
        """Do the same, but return None if there is none."""
        return self._take() if self._unread else None

    async def room(self, num_chunks: int) -> None:
        """Wait until, of so many chunks taken from the stream, few enough are not answered and read."""
        while num_chunks - self._num_read >= MAX_OPEN_CHUNKS:
            await self._wait_for_progress()

    async def answered(self, num_chunks: int) -> None:
        """Wait until so many chunks are answered, read or not."""
        while self._num_boundaries < num_chunks:
            await self._wait_for_progress()

    async def _wait_for_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    def _take(self) -> Any:
        output = self._unread.popleft()
        if not self._unread:
            self.ready.clear()
        if isinstance(output, Exception):
            raise output
        if isinstance(output, RequestOutput) and _is_boundary(output):
            self._num_read += 1
            self._progress.set()
        return output


def _is_boundary(output: RequestOutput) -> bool:
    """Whether an output ends a reply (or, like vLLM's shared end marker, the stream)."""
    return bool(output.finished) or any(completion.finish_reason is not None for completion in output.outputs)


def _forget_input(collector: weakref.ref[BoundaryCollector]) -> None:
    """Let go of a task that has ended, as vLLM's own queue does."""
    live = collector()
    if live is not None:
        live._input_stream_task = None  # noqa: SLF001 - likewise

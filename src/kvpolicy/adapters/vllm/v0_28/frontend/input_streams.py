"""The input side of one stream: its chunks are checked, numbered, and held back while replies are unread."""

from __future__ import annotations

from contextlib import aclosing
from copy import copy
from typing import TYPE_CHECKING, Any

from attrs import define, evolve
from vllm.engine.protocol import StreamingInput
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import InputStreamError

from kvpolicy.adapters.vllm.shared.messages import RETENTION_KEY, STOP_PREFIX, ChunkMarker, ChunkReport
from kvpolicy.core.counts import SessionCounts
from kvpolicy.core.errors import SessionFailedError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from kvpolicy.adapters.vllm.v0_28.frontend.boundary_collector import BoundaryCollector
    from kvpolicy.core.fold import Refuse


@define(eq=False)
class InputStream:
    """One stream on its way to the engine.

    Attributes:
        request_id: the caller's name for it.
        replies: where its replies go.
        params: the stream's own sampling parameters. Those of a chunk replace them, but for what holds for the whole
            stream: the kind of its outputs, and the retention where the first chunk asks for none.
        num_chunks: chunks dealt with so far, refused ones included.
        is_known: whether the engine has been told of it.
        is_complete: whether the end of its input has been dealt with.
        is_stopped: whether an abort has ended it: nothing may be sent any more.
        rank: the data-parallel rank of the engine that holds it; None until that is known, or where there is but one.
    """

    request_id: str
    replies: BoundaryCollector
    params: SamplingParams
    num_chunks: int = 0
    is_known: bool = False
    is_complete: bool = False
    is_stopped: bool = False
    rank: int | None = None

    async def checked(
        self,
        chunks: AsyncGenerator[StreamingInput, None],
        ready: Callable[[StreamingInput], Awaitable[StreamingInput | Refuse]],
    ) -> AsyncGenerator[StreamingInput, None]:
        """Yield the chunks as ``ready`` returns them; answer those that it refuses with a boundary, in their place.

        No further chunk is taken while too many are on their way or unread.
        """
        async with aclosing(chunks):
            async for chunk in chunks:
                checked = await ready(chunk)
                if isinstance(checked, StreamingInput):
                    yield checked
                else:
                    await self.replies.answered(self.num_chunks)
                    self.replies.put(self._refused(checked))
                self.num_chunks += 1
                await self.replies.room(self.num_chunks)

    def input_ended(self) -> None:
        """Tell the consumer if the input has ended in a way that vLLM tells nobody of.

        Its input task takes every cancellation for the end of the request, that of the producer as well.
        """
        if not (self.is_complete or self.is_stopped):
            error = SessionFailedError("input_cancelled", "the stream's input was cancelled")
            self.replies.put(InputStreamError(error))

    def name(self, *, internal: bool) -> str:
        """Return the id by which the caller, or vLLM itself, calls it."""
        return str(self.replies.request_id if internal else self.request_id)

    async def stop(self, caller: asyncio.Task[Any] | None) -> None:
        """End the input before an abort; a stream that the engine has not heard of ends here, like one that it has."""
        self.is_stopped = True
        await self.replies.stop_input(caller)
        if not self.is_known:
            self.replies.put(self._output("abort", None, finished=True))

    def mark(self, request: EngineCoreRequest) -> None:
        """Mark a message with its place, and send it where the session is."""
        marker = ChunkMarker(self.num_chunks, first=not self.is_known, final=not request.resumable)
        extra_args = marker.to_extra_args(request.sampling_params.extra_args)
        if marker.first and extra_args.get(RETENTION_KEY) is None:
            extra_args[RETENTION_KEY] = (self.params.extra_args or {}).get(RETENTION_KEY)
        request.sampling_params = copy(request.sampling_params)
        request.sampling_params.extra_args = extra_args
        if self.rank is not None:
            request.data_parallel_rank = self.rank
        self.is_known = True

    def _refused(self, refusal: Refuse) -> RequestOutput:
        """Return the boundary of a chunk that is not sent; the session is as its last report says."""
        report = evolve(
            self.replies.last_report or ChunkReport(),
            chunk=self.num_chunks,
            since_reply=SessionCounts(),
            code=refusal.code,
            message=refusal.message,
        )
        return self._output("length", STOP_PREFIX + refusal.code, kv_transfer_params=report.to_wire())

    def _output(self, finish_reason: str, stop_reason: str | None, **fields: Any) -> RequestOutput:
        """Return an output without tokens that the engine has no part in."""
        completion = CompletionOutput(
            index=0,
            text="",
            token_ids=[],
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=None,
            prompt_token_ids=[],
            prompt_logprobs=None,
            outputs=[completion],
            **{"finished": False, **fields},
        )

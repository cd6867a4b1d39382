"""The session object of the facade: one push, one reply, over a single ``generate()`` call."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any, Self

from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt

from kvpolicy.adapters.vllm.v0_28.wire import TERMINAL, ChunkReport
from kvpolicy.core.errors import (
    ChunkRefusedError,
    KVPolicyError,
    PolicyUsageError,
    SessionClosedError,
    SessionFailedError,
)
from kvpolicy.core.replies import Reply, SegmentView, SessionStats

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from types import TracebackType

    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams

    from kvpolicy.adapters.vllm.v0_28.turns import TurnEncoder


# As outputs name them.
_TERMINAL = frozenset(map(str, TERMINAL))


class _Pending:
    """The reply being collected."""

    def __init__(self, num_chunk_tokens: int, on_text: Callable[[str], None] | None) -> None:
        self.num_chunk_tokens = num_chunk_tokens
        self._on_text = on_text
        self.started_s = time.perf_counter()
        self.first_s: float | None = None
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def add(self, output: CompletionOutput) -> None:
        if self.first_s is None:
            self.first_s = time.perf_counter()
        self.text.append(output.text)
        if self._on_text is not None and output.text:
            self._on_text(output.text)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or ())

    def fail(self, error: Exception | None) -> None:
        if error is not None and not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # a caller that has stopped waiting will not ask: that is no fault to be logged


class Session:
    """A bounded streaming session. Make one with ``AsyncLLM.open_session``; use it as an async context manager.

    One chunk is in flight at a time: ``push`` waits for that chunk's reply.
    """

    def __init__(self, engine: Any, encoder: TurnEncoder, params: SamplingParams, *, priority: int = 0) -> None:
        """Prepare a session; the engine hears of it with the first push."""
        self.id = f"session-{uuid.uuid4().hex}"
        self._engine = engine
        self._encoder = encoder
        self._params = params
        self._priority = priority
        self._inputs: asyncio.Queue[StreamingInput | None] = asyncio.Queue()
        self._pump: asyncio.Task[None] | None = None
        self._pending: _Pending | None = None
        self._ended: Exception | None = None
        self._is_closing = False
        self._stats = SessionStats()
        self.check_first: Callable[[int, SamplingParams], None] | None = None
        """Is given the number of tokens and the parameters of a chunk while none has been answered, before it is sent.

        What it raises is that push's error, and the session is as it was: asked in the engine, it would be over.
        """

    async def push(
        self,
        turn: str | Sequence[int],
        *,
        sampling_params: SamplingParams | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Feed one chunk and return its reply.

        Args:
            turn: text (rendered with the model's chat template, if the session uses one) or token ids (sent as given).
            sampling_params: for this chunk instead of the session's.
            on_text: is called with each piece of the reply's text as it comes; it must not raise.

        Raises:
            PolicyUsageError: bad input, or the session was not admitted; nothing was sent, or the session has ended.
            SessionClosedError: the session is closed.
            ChunkRefusedError: this chunk cannot be taken in (its code says why); the session goes on without it.
            SessionFailedError: the engine ended the session.
        """
        self._require_ready()
        # The stream checks every chunk, as others feed streams too, and answers with a refusal that is counted. Checked
        # here, bad parameters are an error of this call with all its reasons, and the session does not even begin.
        params = self._engine.checked_session_params(sampling_params or self._params)
        prompt = TokensPrompt(prompt_token_ids=await self._tokens(turn))
        self._require_ready()
        if self.check_first is not None and self._stats.num_chunks == 0:
            self.check_first(len(prompt["prompt_token_ids"]), params)
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(), name=self.id)
        pending = self._pending = _Pending(len(prompt["prompt_token_ids"]), on_text)
        await self._inputs.put(StreamingInput(prompt=prompt, sampling_params=params))
        # Shielded: a caller that stops waiting does not take away the place where the reply will be put.
        return await asyncio.shield(pending.future)

    @property
    def has_ended(self) -> bool:
        """Whether every further push would raise."""
        return self._ended is not None

    def stats(self) -> SessionStats:
        """Return the session's counts as of its last reply."""
        return self._stats

    async def close(self) -> None:
        """End the session and wait until the engine has been told. Calling it again waits for the same end.

        The engine lets go of it before it takes in anything that is sent later.
        """
        pump = self._pump
        self._ended = self._ended or SessionClosedError("session: it was closed")
        if pump is not None:
            if not self._is_closing:
                self._is_closing = True
                if self._pending is not None:
                    pump.cancel()
                else:
                    self._inputs.put_nowait(None)
            await asyncio.wait({pump})
        # A task that is cancelled before its first step runs none of its own clean-up.
        self._fail_pending()

    async def __aenter__(self) -> Self:
        """Return the session itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session."""
        await self.close()

    def _require_ready(self) -> None:
        if self._ended is not None:
            raise self._ended.with_traceback(None)  # raised many times, it must not collect them all
        if self._pending is not None:
            reason = "push: the reply to the chunk before is still pending; one chunk is in flight at a time"
            raise PolicyUsageError(reason)

    async def _tokens(self, turn: str | Sequence[int]) -> list[int]:
        if isinstance(turn, str):
            return await self._encoder.encode_aside(turn)
        tokens = list(turn)
        reasons = []
        if not tokens or any(type(token) is not int or token < 0 for token in tokens):
            reasons.append("turn: expected text or a sequence of at least one token id (integers >= 0)")
        else:
            reasons += self._engine.request_guard.token_errors("turn", tokens)
        if self._encoder.system_prompt and self._stats.num_chunks == 0:
            reasons.append("turn: with token ids, put the system prompt into the first chunk instead of system_prompt=")
        if reasons:
            raise PolicyUsageError(reasons)
        return tokens

    async def _feed(self) -> AsyncGenerator[StreamingInput, None]:
        while (chunk := await self._inputs.get()) is not None:
            yield chunk

    async def _run(self) -> None:
        """Collect outputs into replies until the session ends."""
        error: Exception = SessionClosedError("session: it was closed")
        try:
            async for output in self._engine.generate(
                self._feed(), self._params, request_id=self.id, priority=self._priority
            ):
                self._take(output)
        except asyncio.CancelledError:
            raise
        except Exception as failure:  # noqa: BLE001 - whatever ends the stream reaches the caller of push
            error = failure if isinstance(failure, KVPolicyError) else SessionFailedError("engine", str(failure))
            error.__cause__ = failure if error is not failure else None
        finally:
            self._ended = self._ended or error
            self._fail_pending()

    def _fail_pending(self) -> None:
        """Tell whoever waits for a reply that the session has ended."""
        pending, self._pending = self._pending, None
        if pending is not None and self._ended is not None:
            pending.fail(self._ended)

    def _take(self, output: RequestOutput) -> None:
        pending, completion = self._pending, output.outputs[0]
        if pending is not None:
            pending.add(completion)
        if completion.finish_reason is None:
            return
        report = ChunkReport.from_wire(output.kv_transfer_params)
        self._pending = None
        error = _error_of(completion, report)
        if report is None or completion.finish_reason in _TERMINAL:
            self._ended = self._ended or error
        elif pending is not None:
            self._count(report, pending)
        if pending is None:
            return
        if error is not None or report is None:
            pending.fail(error)
            return
        reply = _reply(pending, completion, report)
        self._encoder.sent()
        if not pending.future.done():
            pending.future.set_result(reply)

    def _count(self, report: ChunkReport, pending: _Pending) -> None:
        old = self._stats
        refused = report.code is not None
        self._stats = SessionStats(
            num_chunks=old.num_chunks + (not refused),
            num_refused=old.num_refused + refused,
            num_reply_tokens=old.num_reply_tokens + len(pending.token_ids),
            resident_tokens=report.resident_tokens,
            num_blocks=report.num_blocks,
            num_segments=report.num_segments,
            next_position=report.next_position,
            num_evictions=report.num_evictions,
            num_evicted_tokens=report.total_evicted_tokens,
            num_consolidations=report.num_consolidations,
            num_parks=report.num_parks,
            num_free_blocks=report.num_free_blocks,
            segments=tuple(SegmentView(*segment) for segment in report.segments),
        )


def _error_of(completion: CompletionOutput, report: ChunkReport | None) -> Exception | None:
    """Return the error that a boundary stands for, or None where it ends a reply."""
    code, message = (report.code, report.message or "") if report is not None else (None, "")
    if completion.finish_reason in _TERMINAL:
        if code == "not_admitted":
            return PolicyUsageError(message.splitlines())
        message = message or f"the engine ended the session ({completion.finish_reason})"
        return SessionFailedError(code or "engine", message)
    if report is None:
        return SessionFailedError("no_report", "the engine sent no report: is the scheduler ours?")
    if code is None:
        return None
    return PolicyUsageError(message.splitlines()) if code == "unusable_chunk" else ChunkRefusedError(code, message)


def _reply(pending: _Pending, completion: CompletionOutput, report: ChunkReport) -> Reply:
    ended_s = time.perf_counter()
    return Reply(
        chunk=report.chunk,
        text="".join(pending.text),
        token_ids=tuple(pending.token_ids),
        finish_reason=completion.finish_reason or "",
        stop_reason=completion.stop_reason,
        ttft_s=(pending.first_s or ended_s) - pending.started_s,
        total_s=ended_s - pending.started_s,
        num_chunk_tokens=pending.num_chunk_tokens,
        evicted=report.evicted,
        resident_tokens=report.resident_tokens,
        num_blocks=report.num_blocks,
        consolidated=report.consolidated,
        logprobs=tuple(pending.logprobs),
    )

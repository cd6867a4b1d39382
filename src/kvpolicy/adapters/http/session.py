"""One open session as the frontend sees it: its frame index, the chunk on its way, and its end.

A chunk that was answered has an index: 0, 1, 2 and so on. One that was refused has none, for the session is as it was
before: whatever comes next gets the index. A client may name the index that it expects:

- the next one, with nothing pending: an ordinary push;
- that of the pending chunk: the request waits for the same reply; if the client comes back before its old
  connection is seen to be gone, it loses nothing;
- that of the last answered chunk: the same reply again, and nothing is pushed;
- anything else, or another chunk under one of these two indices: 409, and nothing changes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvpolicy.adapters.http import log as events
from kvpolicy.adapters.http.end_reasons import Ending, EndReason
from kvpolicy.adapters.http.errors import ApiError, api_error, conflict, internal_error
from kvpolicy.adapters.http.frontend_context import (
    NOTHING_PUSHED,
    READING_A_FRAME,
    Surroundings,
    engine_sentence,
    enqueue_deadline_passed,
)
from kvpolicy.adapters.http.images import decode_image
from kvpolicy.adapters.http.pending_chunk import Flight
from kvpolicy.adapters.http.views import reply_body, status_body
from kvpolicy.core.errors import PolicyUsageError, SessionClosedError
from kvpolicy.core.replies import SessionStats
from kvpolicy.core.session_ids import shown_id
from kvpolicy.core.session_port import ImageTurn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpolicy.adapters.http.bodies import Frame
    from kvpolicy.adapters.http.pending_chunk import Waiter
    from kvpolicy.adapters.http.schemas import StatusReply
    from kvpolicy.core.replies import Reply
    from kvpolicy.core.session_port import SessionPort


class ServedSession:
    """An open session. ``on_change`` is called when its state or its counts have changed."""

    def __init__(
        self,
        session_id: str,
        port: SessionPort,
        *,
        sampling: Mapping[str, Any],
        around: Surroundings,
        on_change: Callable[[ServedSession], None],
    ) -> None:
        """Begin to serve ``port``; the running loop is the one that everything else is called in."""
        self.id = session_id
        self.max_blocks = port.max_blocks
        self.ending: Ending | None = None
        self.num_frames = 0
        self._port = port
        self._sampling = sampling
        self._around = around
        self._on_change = on_change
        self._log = around.log.bind(session=shown_id(session_id))
        self._pending: Flight | None = None
        self._answered: Flight | None = None
        self._driver: asyncio.Task[None] | None = None
        self._release: asyncio.Task[None] | None = None
        self._num_refused = 0
        # What the metrics have of it.
        self._counted = SessionStats()
        self._opened_s = self._used_s = around.clock()
        self._log.info(events.SESSION_OPENED, max_blocks=self.max_blocks)

    @property
    def state(self) -> str:
        """Return "idle", "pending" or "ended"."""
        if self.ending is not None:
            return "ended"
        return "idle" if self._pending is None else "pending"

    @property
    def is_released(self) -> bool:
        """Whether it has ended and the engine has let go of it."""
        return self._release is not None and self._release.done()

    @property
    def stats(self) -> SessionStats:
        """The engine's counts, as of the last reply."""
        return self._port.stats()

    def idle_s(self) -> float:
        """Return for how long nobody has used it."""
        return 0.0 if self._pending is not None else self._around.clock() - self._used_s

    def status(self) -> StatusReply:
        """Return what it holds and has done."""
        return status_body(
            self._port.stats(),
            session_id=self.id,
            state=self.state,
            reason=None if self.ending is None else "\n".join(self.ending.sentences),
            frames=self.num_frames,
            refused=self._num_refused,
            max_blocks=self.max_blocks,
            age_s=self._around.clock() - self._opened_s,
            idle_s=self.idle_s(),
        )

    def require_open(self) -> None:
        """Raise if it has ended; otherwise it counts as used.

        Raises:
            ApiError: 409 with the reason.
        """
        if self.ending is not None:
            raise self.ending.error()
        self._used_s = self._around.clock()

    def require_nothing_pending(self) -> None:
        """Raise if a chunk is on its way.

        Raises:
            ApiError: 409.
        """
        if self._pending is not None:
            message = (
                f"frame: the reply to chunk {self._pending.index} of this session is pending, and one chunk is in "
                "flight at a time; wait for it (to ask for it again, send the same chunk with its frame_index)"
            )
            raise conflict("frame_pending", message)

    def submit(self, frame: Frame, *, deadline_s: float) -> Waiter:
        """Push a chunk, or find the one that this request repeats; return a place to wait for the reply.

        ``deadline_s`` is the time of the loop by which the chunk must be with the engine.

        Raises:
            ApiError: 409, as the module's docstring says. Nothing has changed then.
        """
        self.require_open()
        digest, pending, answered = frame.digest(), self._pending, self._answered
        for flight in (pending, answered if pending is None else None):
            if flight is not None and frame.index == flight.index:
                if digest != flight.digest:
                    message = (
                        f"frame_index: {flight.index} is that of another chunk; the next index is {flight.index + 1}"
                    )
                    raise conflict("frame_differs", message)
                return flight.wait()
        self.require_nothing_pending()
        if frame.index not in (None, self.num_frames):
            raise conflict("frame_index", f"frame_index: expected {self.num_frames}, the next one, got {frame.index}")
        flight = Flight(self.num_frames, digest, self._abandon)
        self._pending = flight
        self._driver = asyncio.create_task(self._drive(frame, flight, deadline_s), name=f"push-{shown_id(self.id)}")
        self._on_change(self)
        return flight.wait()

    async def _drive(self, frame: Frame, flight: Flight, deadline_s: float) -> None:
        """Bring one chunk to the engine and its reply back."""
        try:
            try:
                turn = await self._turn(frame, deadline_s)
                reply = await self._push(turn, frame, flight)
            except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
                self._failed(flight, error)
            else:
                self._succeeded(flight, reply)
        except Exception as error:  # noqa: BLE001 - a fault in the handling itself must not leave anybody waiting
            self._broke(flight, error)

    async def _turn(self, frame: Frame, deadline_s: float) -> str | ImageTurn:
        if frame.image is None:
            return frame.text
        try:
            async with asyncio.timeout_at(deadline_s):
                image = await asyncio.to_thread(decode_image, frame.image, self._around.settings.max_frame_pixels)
        except TimeoutError:
            raise enqueue_deadline_passed(self._around, READING_A_FRAME, NOTHING_PUSHED) from None
        return ImageTurn(image=image, text=frame.text)

    async def _push(self, turn: str | ImageTurn, frame: Frame, flight: Flight) -> Reply:
        sampling = {**self._sampling, **frame.sampling} if frame.sampling else None
        deadline = asyncio.timeout(self._around.settings.reply_deadline_s)
        try:
            async with deadline:
                return await self._port.push(turn, sampling=sampling, on_text=flight.add)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise _ReplyDeadlinePassed from None

    def _succeeded(self, flight: Flight, reply: Reply) -> None:
        if self.ending is not None:
            return
        stats = self._port.stats()
        body = reply_body(self.id, flight.index, reply)
        self._pending, self._answered, self.num_frames = None, flight, flight.index + 1
        self._used_s = self._around.clock()
        self._around.metrics.answered(reply, stats.since(self._counted))
        self._counted = stats
        self._log.info(events.CHUNK_ANSWERED, **body.model_dump(exclude={"session_id", "text", "stop_reason"}))
        flight.answer(body)
        self._on_change(self)
        self.notice_end()

    def _failed(self, flight: Flight, error: Exception) -> None:
        """Tell those who wait; the session goes on where the engine still has it."""
        if self.ending is not None:
            return
        known = api_error(error)
        if isinstance(error, _ReplyDeadlinePassed):
            self._around.metrics.timed_out("reply")
            limit_s = self._around.settings.reply_deadline_s
            self.end(EndReason.REPLY_DEADLINE, f"the reply to chunk {flight.index} took longer than {limit_s:g} s")
        elif (failure := self._around.engine.failure()) is not None:
            self.end(EndReason.ENGINE, engine_sentence(failure))
        elif known is None:
            self._broke(flight, error)
        elif self._port.has_ended:
            flight.fail(known)
            refused = isinstance(error, PolicyUsageError) and not isinstance(error, SessionClosedError)
            self.end(EndReason.NOT_ADMITTED if refused else EndReason.FAILED, *known.reasons)
        else:
            self._refused(flight, known)

    def _broke(self, flight: Flight, error: Exception) -> None:
        """End the session after a fault of ours; who waits is told that it was one."""
        self._log.error(events.FAULT, exc_info=error)
        flight.fail(internal_error(error))
        self.end(EndReason.INTERNAL, "a chunk failed in an unexpected way")

    def _refused(self, flight: Flight, error: ApiError) -> None:
        self._pending = None
        self._num_refused += 1
        self._used_s = self._around.clock()
        self._around.metrics.refused(error.code)
        self._log.warning(events.CHUNK_REFUSED, code=error.code, status=error.status)
        flight.fail(error)
        self._on_change(self)

    def _abandon(self) -> None:
        self.end(EndReason.DISCONNECT, "the client disconnected before the reply was complete")

    def notice_end(self) -> None:
        """End it here too, if the engine has ended it while no chunk was pending."""
        if self.ending is None and self._pending is None and self._port.has_ended:
            self.end(EndReason.FAILED, "the engine ended it")

    def end(self, reason: EndReason, *sentences: str) -> None:
        """End it now: who waits is told, and the engine is asked to let go. Calling it again does nothing."""
        if self.ending is not None:
            return
        self.ending = Ending(reason, sentences)
        flight, self._pending = self._pending, None
        if flight is not None:
            flight.fail(self.ending.pending_error())
        self._answered = None
        self._release = asyncio.create_task(self._let_go(), name=f"release-{shown_id(self.id)}")
        self._release.add_done_callback(lambda _: self._on_change(self))
        self._around.metrics.closed(reason)
        self._log.info(events.SESSION_CLOSED, reason=str(reason), frames=self.num_frames, refused=self._num_refused)
        self._on_change(self)

    async def _let_go(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
        try:
            await self._port.close()
        except Exception as error:  # noqa: BLE001 - an engine that cannot even close has nothing to give back
            self._log.error(events.RELEASE_FAILED, exc_info=error)

    async def released(self) -> bool:
        """Wait until the engine has let go of an ended session, but not for ever; return whether it has."""
        if self._release is None:
            return False
        done, _ = await asyncio.wait({self._release}, timeout=self._around.settings.close_deadline_s)
        if not done:
            self._around.metrics.timed_out("close")
            self._log.error(events.RELEASE_LATE, after_s=self._around.settings.close_deadline_s)
        return bool(done)


class _ReplyDeadlinePassed(Exception):  # noqa: N818 - no error of its own: it becomes the end of a session
    """The engine has not answered in time."""

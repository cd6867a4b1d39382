"""All sessions of a server: who may come in, who is found, who has been silent too long, and what is said of the dead.

A session holds its place (one of ``max_sessions``, and ``max_blocks`` of the pool) from its admission until the engine
has been told to let go of it, which is later than its end.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from typing import TYPE_CHECKING, Any

from attrs import frozen

from kvpolicy.adapters.http.end_reasons import EndReason
from kvpolicy.adapters.http.errors import bad_request, unavailable, unknown_session
from kvpolicy.adapters.http.frontend_context import engine_sentence
from kvpolicy.adapters.http.schemas import CloseReply
from kvpolicy.adapters.http.session import ServedSession

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpolicy.adapters.http.end_reasons import Ending
    from kvpolicy.adapters.http.frontend_context import Surroundings
    from kvpolicy.adapters.http.schemas import StatusReply
    from kvpolicy.core.session_port import SessionPort

_ID_BYTES = 24
# Opening and closing in a loop must not fill the memory: beyond this the oldest are forgotten before their time.
_MAX_TOMBSTONES = 4096


@frozen
class _Tombstone:
    """What is remembered of a session that has ended: what it was, without what it held."""

    ending: Ending
    status: StatusReply
    ended_s: float


class SessionRegistry:
    """The sessions of one engine. Everything is called in one running loop."""

    def __init__(self, around: Surroundings) -> None:
        """Begin with none."""
        facts = around.engine.facts()
        wanted = around.settings.max_sessions
        self.max_sessions = facts.max_sessions if wanted is None else min(wanted, facts.max_sessions)
        self.num_pool_blocks = facts.num_pool_blocks
        self._around = around
        self._holding: dict[str, ServedSession] = {}
        self._tombstones: dict[str, _Tombstone] = {}

    @property
    def holding(self) -> tuple[ServedSession, ...]:
        """The sessions that hold a place: the open ones, and those that the engine has not let go of yet."""
        return tuple(self._holding.values())

    @property
    def num_promised_blocks(self) -> int:
        """What all of them can come to hold."""
        return sum(session.max_blocks for session in self._holding.values())

    def admit(self, port: SessionPort, sampling: Mapping[str, Any]) -> ServedSession:
        """Give a session a place and an id.

        Raises:
            ApiError: 503, there is no room now; 400, there never will be. The caller still has to close ``port``.
        """
        need, promised = port.max_blocks, self.num_promised_blocks
        if need > self.num_pool_blocks:
            message = f"retention: the session may need {need} blocks, and the engine has {self.num_pool_blocks} in all"
            raise bad_request("never_fits", f"{message}; ask for a smaller total_tokens")
        reasons, advice = [], "close a session, or try again later"
        if len(self._holding) >= self.max_sessions:
            reasons.append(f"sessions: {len(self._holding)} are open and at most {self.max_sessions} may be")
        if promised + need > self.num_pool_blocks:
            reasons.append(
                f"blocks: the open sessions may need {promised} and this one {need}, together {promised + need}, and "
                f"the engine has {self.num_pool_blocks}"
            )
            advice += ", or ask for a smaller total_tokens"
        if reasons:
            self._around.metrics.no_room()
            raise unavailable(
                "no_room", "\n".join([*reasons, advice]), reasons=reasons, retry_after_s=self._retry_after_s()
            )
        session = ServedSession(
            secrets.token_urlsafe(_ID_BYTES), port, sampling=sampling, around=self._around, on_change=self._note
        )
        self._holding[session.id] = session
        self._show()
        return session

    def find(self, session_id: str) -> ServedSession:
        """Return the open session with this id; it counts as used.

        Raises:
            ApiError: 404, or 409 for one that has ended a short while ago.
        """
        session = self._holding.get(session_id)
        if session is not None:
            session.notice_end()
            if session.ending is None:
                session.require_open()
                return session
        raise self._tombstone(session_id).ending.error()

    def status(self, session_id: str) -> StatusReply:
        """Return the status of a session, also of one that has ended a short while ago.

        Raises:
            ApiError: 404.
        """
        session = self._holding.get(session_id)
        if session is not None:
            session.notice_end()
            if session.ending is None:
                return session.status()
        return self._tombstone(session_id).status

    async def close(self, session_id: str) -> CloseReply:
        """Close a session for its client; one that has ended a short while ago is closed already.

        Raises:
            ApiError: 404.
        """
        session = self._holding.get(session_id)
        if session is None:
            return CloseReply(session_id=session_id, frames=self._tombstone(session_id).status.frames, closed=True)
        session.end(EndReason.CLIENT, "its client closed it")
        return CloseReply(session_id=session_id, frames=session.num_frames, closed=await session.released())

    def abandon(self, session_id: str) -> None:
        """End a session whose opener has gone before it was told the id."""
        session = self._holding.get(session_id)
        if session is not None:
            session.end(EndReason.DISCONNECT, "the client disconnected before it was told the id")

    async def reap(self) -> None:
        """Close the sessions that have been silent for too long, and wait until the engine has let go of them."""
        await asyncio.gather(*(session.released() for session in self.end_silent()))

    def end_silent(self) -> list[ServedSession]:
        """Begin to close the sessions that have been silent for too long; return them."""
        limit_s = self._around.settings.idle_timeout_s
        silent = [session for session in self.holding if session.ending is None and session.idle_s() > limit_s]
        for session in silent:
            session.end(EndReason.IDLE, f"it was idle for more than {limit_s:g} s")
        return silent

    async def end_all(self, reason: EndReason, sentence: str) -> None:
        """End every session, and wait until the engine has let go of them."""
        sessions = self.holding
        for session in sessions:
            session.end(reason, sentence)
        await asyncio.gather(*(session.released() for session in sessions))

    def notice_ends(self) -> None:
        """End what the engine has ended."""
        failure = self._around.engine.failure()
        for session in self.holding:
            if failure is not None:
                session.end(EndReason.ENGINE, engine_sentence(failure))
            session.notice_end()

    def forget(self) -> None:
        """Drop what need not be remembered any more."""
        oldest_s = self._around.clock() - self._around.settings.tombstone_s
        for session_id, stone in list(self._tombstones.items()):
            if stone.ended_s >= oldest_s and len(self._tombstones) <= _MAX_TOMBSTONES:
                break
            del self._tombstones[session_id]

    def _tombstone(self, session_id: str) -> _Tombstone:
        self.forget()
        stone = self._tombstones.get(session_id)
        if stone is None:
            raise unknown_session()
        return stone

    def _note(self, session: ServedSession) -> None:
        """Follow a session's change of state."""
        if session.ending is not None and session.id not in self._tombstones and not session.is_released:
            status = session.status().model_copy(update={"segments": [], "resident_tokens": 0, "blocks": 0})
            self._tombstones[session.id] = _Tombstone(session.ending, status, self._around.clock())
            self.forget()
        if session.is_released:
            self._holding.pop(session.id, None)
        self._show()

    def _show(self) -> None:
        self._around.metrics.show(
            ("closing" if session.ending is not None else session.state, session.stats) for session in self.holding
        )

    def _retry_after_s(self) -> int:
        """Return when the next silent session may be reaped: the first moment at which a place is sure to be free."""
        settings = self._around.settings
        left_s = [settings.idle_timeout_s - session.idle_s() for session in self.holding if session.ending is None]
        return max(1, math.ceil(min([settings.reaper_period_s, *left_s])))

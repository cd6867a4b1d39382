"""An engine with sessions that does what a test tells it: answers, refusals, failures, and waits."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from attrs import evolve

from kvpolicy.core.budget import RetentionBudget, SessionLimits
from kvpolicy.core.errors import ChunkRefusedError, PolicyUsageError, SessionClosedError
from kvpolicy.core.replies import Reply, SegmentView, SessionStats
from kvpolicy.core.session_port import EngineFacts, ImageTurn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FACTS = EngineFacts(
    model_names=("fake-model", "its-other-name"),
    block_size=16,
    context_limit=8192,
    trained_range=8192,
    num_pool_blocks=1000,
    max_sessions=8,
    takes_images=True,
    sampling_fields=("max_tokens", "temperature"),
)
BLOCKS_OF_UNBOUNDED = 512


class FakeSession:
    """Satisfies ``SessionPort``. One chunk in flight, as with the real one."""

    def __init__(self, engine: FakeEngine, retention: Mapping[str, Any] | None, sampling: Mapping[str, Any]) -> None:
        self.retention, self.sampling = retention, sampling
        self.turns: list[str | ImageTurn] = []
        self.samplings: list[Mapping[str, Any] | None] = []
        self.num_closes = 0
        self._engine = engine
        self._ended: asyncio.Future[Any] | None = None
        self._error: Exception | None = None
        self._has_pushed = False
        self._stats = SessionStats()

    @property
    def max_blocks(self) -> int:
        """Whole blocks of the total."""
        if self.retention is None:
            return BLOCKS_OF_UNBOUNDED
        return -(-int(self.retention["total_tokens"]) // self._engine.facts().block_size)

    @property
    def has_ended(self) -> bool:
        """Whether every further push would raise."""
        return self._error is not None

    def stats(self) -> SessionStats:
        """Return the counts as of the last reply."""
        return self._stats

    def break_down(self, error: Exception) -> None:
        """Let the engine end it: a pending push raises ``error``."""
        self._error = self._error or error
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def push(
        self,
        turn: str | ImageTurn,
        *,
        sampling: Mapping[str, Any] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Do the next thing in the engine's script; without one, answer with the chunk's own words."""
        if self._error is not None:
            raise self._error
        assert self._ended is None, "the frontend has pushed a second chunk"
        self._has_pushed = True
        self._ended = asyncio.get_running_loop().create_future()
        try:
            return await self._answer(turn, sampling, on_text)
        finally:
            self._ended = None

    async def close(self) -> None:
        """End it; with ``hold_closes`` the engine takes its time, if it has heard of the session."""
        self.num_closes += 1
        self.break_down(SessionClosedError("session: it was closed"))
        if self._engine.close_error is not None:
            raise self._engine.close_error
        if self._engine.hold_closes is not None and self._has_pushed:
            await self._engine.hold_closes.wait()
        self._engine.live.discard(self)

    async def _answer(
        self, turn: str | ImageTurn, sampling: Mapping[str, Any] | None, on_text: Callable[[str], None] | None
    ) -> Reply:
        words = (turn if isinstance(turn, str) else f"{turn.image.width}x{turn.image.height} {turn.text}").split()
        pieces = [f"{word} " for word in words]
        for number, piece in enumerate(pieces):
            if number == self._engine.pieces_before_hold:
                await self._held()
            if on_text is not None:
                on_text(piece)
            await asyncio.sleep(0)
        if self._engine.pieces_before_hold >= len(pieces):
            await self._held()
        if self._error is not None:
            raise self._error
        if self._engine.script and (error := self._engine.script.popleft()) is not None:
            if isinstance(error, ChunkRefusedError):
                self._stats = evolve(self._stats, num_refused=self._stats.num_refused + 1)
            elif self._engine.errors_end_sessions:
                self._error = error
            raise error
        self.turns.append(turn)
        self.samplings.append(sampling)
        return self._count("".join(pieces), len(words))

    async def _held(self) -> None:
        """Wait until the engine goes on, or has ended this session."""
        hold, ended = self._engine.hold_pushes, self._ended
        assert ended is not None
        if hold is None:
            return
        if self._engine.pushes_outlive_closes:
            await hold.wait()
            return
        waiting: asyncio.Future[Any] = asyncio.ensure_future(hold.wait())
        self._engine.waiting.add(self)
        try:
            await asyncio.wait([waiting, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            self._engine.waiting.discard(self)

    def _count(self, text: str, num_tokens: int) -> Reply:
        limit = int((self.retention or {"total_tokens": 10**9})["total_tokens"])
        wanted = self._stats.resident_tokens + 2 * num_tokens
        resident = min(limit, wanted)
        self._stats = evolve(
            self._stats,
            num_chunks=self._stats.num_chunks + 1,
            num_reply_tokens=self._stats.num_reply_tokens + num_tokens,
            resident_tokens=resident,
            num_blocks=-(-resident // 16),
            num_evictions=self._stats.num_evictions + (wanted > resident),
            num_evicted_tokens=self._stats.num_evicted_tokens + wanted - resident,
            num_consolidations=self._stats.num_consolidations + self._engine.consolidates,
            segments=(SegmentView("anchor", num_tokens), SegmentView("content", resident - num_tokens)),
        )
        return Reply(
            chunk=self._stats.num_chunks - 1,
            text=text,
            token_ids=tuple(range(num_tokens)),
            finish_reason=self._engine.finish_reason,
            stop_reason=None,
            ttft_s=0.01,
            total_s=0.02,
            num_chunk_tokens=num_tokens,
            num_evicted_tokens=wanted - resident,
            resident_tokens=resident,
            num_blocks=self._stats.num_blocks,
            consolidated=self._engine.consolidates,
        )


class FakeEngine:
    """Satisfies ``EnginePort``. Its attributes are the script; events belong to the loop that serves it."""

    session_class = FakeSession

    def __init__(self, facts: EngineFacts = FACTS) -> None:
        self.sessions: list[FakeSession] = []
        self.live: set[FakeSession] = set()
        self.waiting: set[FakeSession] = set()
        self.opened: list[dict[str, Any]] = []
        # What the next pushes come to, before their reply: an error to raise, or None.
        self.script: deque[Exception | None] = deque()
        self.errors_end_sessions = False
        self.consolidates = False
        self.finish_reason: Any = "stop"
        # While these are set events that have not happened, pushes (after some pieces) and closes wait.
        self.hold_pushes: asyncio.Event | None = None
        self.pieces_before_hold = 0
        self.pushes_outlive_closes = False
        self.hold_closes: asyncio.Event | None = None
        self.close_error: Exception | None = None
        self._facts = facts
        self._failure: str | None = None

    def facts(self) -> EngineFacts:
        """Return what it offers."""
        return self._facts

    def failure(self) -> str | None:
        """Return why it is dead."""
        return self._failure

    def die(self, reason: str, error: Exception | None) -> None:
        """Fail as a whole. ``error`` reaches those who wait; None: they are left waiting."""
        self._failure = reason
        if error is not None:
            for session in self.sessions:
                session.break_down(error)

    async def open_session(
        self,
        *,
        system_prompt: str | None,
        retention: Mapping[str, Any] | None,
        sampling: Mapping[str, Any],
        priority: int,
    ) -> FakeSession:
        """Return a session, unless its sampling has an unknown field or its budget cannot be."""
        if "no_such_field" in sampling:
            raise PolicyUsageError(["sampling: unknown field 'no_such_field'", "sampling: and another reason"])
        self.opened.append({"system_prompt": system_prompt, "retention": retention, "priority": priority})
        session = self.session_class(self, self._in_force(retention, sampling["max_tokens"]), sampling)
        self.sessions.append(session)
        self.live.add(session)
        return session

    def _in_force(self, retention: Mapping[str, Any] | None, max_tokens: int) -> Mapping[str, Any] | None:
        if retention is None:
            return None
        facts = self.facts()
        limits = SessionLimits(
            block_size=facts.block_size,
            context_limit=facts.context_limit,
            trained_range=facts.trained_range,
            num_pool_blocks=facts.num_pool_blocks,
        )
        return RetentionBudget.from_mapping(retention).resolved(limits, max_tokens).to_mapping()

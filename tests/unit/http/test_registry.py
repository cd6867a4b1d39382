"""Whatever clients and engine do: never too many sessions, never too many blocks, every session closed once."""

from __future__ import annotations

import asyncio
from typing import Any

from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpolicy.adapters.http.bodies import Frame
from kvpolicy.adapters.http.errors import ApiError
from kvpolicy.adapters.http.frontend import SessionFrontend
from kvpolicy.adapters.http.schemas import OpenRequest
from kvpolicy.adapters.http.settings import ServerSettings
from kvpolicy.core.errors import ChunkRefusedError, SessionFailedError
from tests.fakes.session_engine import FACTS, FakeEngine
from tests.unit.http.serving import Clock

MAX_SESSIONS, POOL = 3, 200


class ServerMachine(RuleBasedStateMachine):
    """A frontend with a scripted engine, seen from the engine's side."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.engine = FakeEngine(evolve(FACTS, num_pool_blocks=POOL, max_sessions=MAX_SESSIONS))
        self.clock = Clock()
        self.frontend = SessionFrontend(
            ServerSettings(idle_timeout_s=100, tombstone_s=50, close_deadline_s=0.001), clock=self.clock
        )
        self.waiters: list[Any] = []
        self.ids: list[str] = []
        self.run(self._start())

    def run(self, step: Any) -> Any:
        """Run one step, and what follows from it."""
        try:
            result = self.loop.run_until_complete(step)
        except ApiError as error:
            result = error
        self.loop.run_until_complete(_settle())
        return result

    async def _start(self) -> None:
        self.engine.hold_pushes, self.engine.hold_closes = asyncio.Event(), asyncio.Event()
        self._let_pushes_go()
        self._let_closes_go()
        self.frontend.start(self.engine)

    def _let_pushes_go(self) -> None:
        assert self.engine.hold_pushes is not None
        self.engine.hold_pushes.set()

    def _let_closes_go(self) -> None:
        assert self.engine.hold_closes is not None
        self.engine.hold_closes.set()

    @rule(total=st.sampled_from([1024, 1600, 2400, 99_999]))
    def open(self, total: int) -> None:
        before = [session for session in self.engine.sessions if session in self.engine.live]
        answer = self.run(self.frontend.open(OpenRequest.model_validate({"retention": {"total_tokens": total}})))
        if isinstance(answer, ApiError):
            assert answer.status == (400 if total == 99_999 else 503)
            held = self.frontend.registry.holding
            need = -(-total // 16)
            assert len(held) == MAX_SESSIONS or sum(s.max_blocks for s in held) + need > POOL
            assert self.engine.sessions[-1].num_closes == 1
        else:
            assert len(before) <= MAX_SESSIONS
            self.ids.append(answer.session_id)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), index=st.sampled_from([None, 0, 1]))
    def push(self, data: st.DataObject, index: int | None) -> None:
        session_id = data.draw(st.sampled_from(self.ids))

        async def step() -> None:
            session = self.frontend.registry.find(session_id)
            waiter = session.submit(Frame(text="hi", index=index), deadline_s=self.loop.time() + 10)
            self.waiters.append(waiter)

        self.run(step())

    @rule()
    def hold_pushes(self) -> None:
        assert self.engine.hold_pushes is not None
        self.engine.hold_pushes.clear()

    @rule()
    def go_on(self) -> None:
        self._let_pushes_go()
        self.run(_settle())
        assert all(waiter.flight.has_ended for waiter in self.waiters)

    @rule()
    def hold_closes(self) -> None:
        assert self.engine.hold_closes is not None
        self.engine.hold_closes.clear()

    @rule()
    def let_closes_go(self) -> None:
        self._let_closes_go()
        self.run(_settle())

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiters))

        async def step() -> None:
            waiter.leave()

        self.run(step())
        assert waiter.flight.has_ended or any(
            other.flight is waiter.flight and not other._has_left for other in self.waiters
        )

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session_id = data.draw(st.sampled_from(self.ids))
        answer = self.run(self.frontend.registry.close(session_id))
        assert isinstance(answer, ApiError) or self.frontend.registry.status(session_id).state == "ended"

    @rule(error=st.sampled_from([ChunkRefusedError("no", "no"), SessionFailedError("gone", "gone"), RuntimeError("x")]))
    def let_the_next_push_fail(self, error: Exception) -> None:
        self.engine.script.append(error)
        self.engine.errors_end_sessions = True

    @precondition(lambda self: self.engine.sessions)
    @rule(data=st.data())
    def let_the_engine_end_one(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.engine.sessions))

        async def step() -> None:
            session.break_down(SessionFailedError("gone", "gone"))
            await _settle()
            self.frontend.registry.notice_ends()

        self.run(step())

    @rule(seconds=st.sampled_from([1, 60, 101]))
    def pass_time(self, seconds: int) -> None:
        self.clock.now_s += seconds

    @rule()
    def reap(self) -> None:
        self.run(self.frontend.registry.reap())
        self.run(_called(self.frontend.registry.forget))

    @invariant()
    def the_engine_never_has_more_than_allowed(self) -> None:
        assert len(self.engine.live) <= MAX_SESSIONS
        assert sum(session.max_blocks for session in self.engine.live) <= POOL

    @invariant()
    def what_holds_a_place_is_what_the_engine_has(self) -> None:
        assert len(self.frontend.registry.holding) == len(self.engine.live)
        assert self.frontend.registry.num_promised_blocks == sum(s.max_blocks for s in self.engine.live)

    @invariant()
    def no_session_is_closed_twice(self) -> None:
        assert all(session.num_closes <= 1 for session in self.engine.sessions)

    def teardown(self) -> None:
        """Stop: everything is closed exactly once."""
        self._let_closes_go()
        self.run(self.frontend.stop())
        assert all(session.num_closes == 1 for session in self.engine.sessions)
        assert not self.engine.live
        assert all(waiter.flight.has_ended for waiter in self.waiters)
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()


async def _settle() -> None:
    """Let everything happen that can happen without time."""
    for _ in range(25):
        await asyncio.sleep(0)


async def _called(function: Any) -> None:
    function()


TestServer = ServerMachine.TestCase
TestServer.settings = settings(settings.default, max_examples=80, stateful_step_count=30)

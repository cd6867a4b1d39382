"""The session service: opening, finding and closing sessions of one engine, and the life of what is behind them."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvpolicy.adapters.http import log as events
from kvpolicy.adapters.http.body_budget import BodyBudget
from kvpolicy.adapters.http.end_reasons import EndReason
from kvpolicy.adapters.http.errors import bad_request, gone, unavailable
from kvpolicy.adapters.http.frontend_context import Surroundings, engine_sentence, enqueue_deadline_passed
from kvpolicy.adapters.http.log import make_logger
from kvpolicy.adapters.http.metrics import SessionMetrics
from kvpolicy.adapters.http.registry import SessionRegistry
from kvpolicy.adapters.http.schemas import ConfigReply, OpenReply
from kvpolicy.core.budget import RetentionBudget
from kvpolicy.core.checks import reject
from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from kvpolicy.adapters.http.schemas import OpenRequest
    from kvpolicy.adapters.http.settings import ServerSettings
    from kvpolicy.core.session_port import EngineFacts, EnginePort

# How often it is asked whether the engine lives: what the clients of a dead one wait at most.
_WATCH_PERIOD_S = 0.5
# How much of a name that means nothing here is repeated.
_NUM_SHOWN = 100


class SessionService:
    """Bounded sessions over HTTP. ``attach`` it to an application, ``start`` it in the loop, ``stop`` it at the end."""

    def __init__(self, settings: ServerSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare a frontend; ``clock`` measures idleness and age, in seconds."""
        self.settings = settings
        self.bodies = BodyBudget(settings)
        self._clock = clock
        self._around: Surroundings | None = None
        self._registry: SessionRegistry | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_stopping = False

    def start(self, engine: EnginePort) -> None:
        """Serve the sessions of ``engine``. Call it once, in the running loop that serves the application."""
        if self._around is not None:
            raise PolicyUsageError("frontend: expected one start, got a second one; make another frontend")
        self._around = Surroundings(
            engine=engine,
            settings=self.settings,
            metrics=SessionMetrics(engine.facts().model),
            clock=self._clock,
            log=make_logger(),
        )
        self._registry = SessionRegistry(self._around)
        self._watcher = asyncio.create_task(self._watch(), name="session-watcher")

    async def stop(self) -> None:
        """Close every session and answer 503 from now on. Calling it again does nothing."""
        self._is_stopping = True
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.wait({watcher})
        if self._registry is not None:
            await self._registry.end_all(EndReason.SHUTDOWN, "the server is shutting down")

    @property
    def registry(self) -> SessionRegistry:
        """The sessions; there are none before ``start``.

        Raises:
            ApiError: 503, it has not been started.
        """
        if self._registry is None:
            raise unavailable("starting", "server: it is starting, try again in a moment", retry_after_s=1)
        return self._registry

    def require_running(self) -> None:
        """Raise unless sessions can be served.

        Raises:
            ApiError: 503 with the reason.
        """
        engine = self._surroundings().engine
        if self._is_stopping:
            raise gone("ended_shutdown", "server: it is shutting down")
        if (failure := engine.failure()) is not None:
            self.registry.notice_ends()
            raise gone("ended_engine", f"server: {engine_sentence(failure)}")

    def require_images(self) -> None:
        """Raise if the model takes text only.

        Raises:
            ApiError: 400.
        """
        facts = self._facts()
        if not facts.takes_images:
            raise bad_request("no_images", f"image: the model {facts.model} takes text only; send text/plain or JSON")

    @asynccontextmanager
    async def enqueue_deadline(self, what: str, outcome: str) -> AsyncIterator[None]:
        """Limit what is read in the block. If it passes, ``what`` took too long, and ``outcome`` is what that means.

        Raises:
            ApiError: 503, the deadline has passed.
        """
        try:
            async with asyncio.timeout(self.settings.enqueue_deadline_s):
                yield
        except TimeoutError:
            raise enqueue_deadline_passed(self._surroundings(), what, outcome) from None

    async def open(self, wanted: OpenRequest) -> OpenReply:
        """Open a session.

        Raises:
            ApiError: 400 or 503.
            PolicyUsageError: every reason why such a session cannot be.
        """
        facts = self._facts()
        sampling = {**self.settings.sampling(), **wanted.sampling.given()}
        reasons = list(_model_errors(wanted, facts))
        try:
            port = await self._surroundings().engine.open_session(
                system_prompt=wanted.system_prompt,
                retention=None if wanted.retention is None else wanted.retention.given(),
                sampling=sampling,
                priority=wanted.priority,
            )
        except PolicyUsageError as error:
            raise PolicyUsageError([*reasons, *error.reasons]) from None
        try:
            reject(reasons)
            await self.registry.reap()
            self.require_running()
            session = self.registry.admit(port, sampling)
        except BaseException:
            await port.close()
            raise
        return OpenReply(
            session_id=session.id,
            model=facts.model,
            max_blocks=session.max_blocks,
            retention=None if port.retention is None else dict(port.retention),
            sampling=sampling,
        )

    def config(self) -> ConfigReply:
        """Return the defaults and the limits."""
        facts, settings = self._facts(), self.settings
        return ConfigReply(
            model=facts.model,
            takes_images=facts.takes_images,
            engine={
                "context_limit": facts.context_limit,
                "trained_range": facts.trained_range,
                "block_size": facts.block_size,
                "num_pool_blocks": facts.num_pool_blocks,
            },
            limits={
                "max_sessions": self.registry.max_sessions,
                "max_body_bytes": settings.max_body_bytes,
                "max_inflight_bytes": settings.inflight_bytes(),
                "max_frame_pixels": settings.max_frame_pixels,
                "enqueue_deadline_s": settings.enqueue_deadline_s,
                "reply_deadline_s": settings.reply_deadline_s,
                "close_deadline_s": settings.close_deadline_s,
                "idle_timeout_s": settings.idle_timeout_s,
                "tombstone_s": settings.tombstone_s,
            },
            sampling=settings.sampling(),
            sampling_fields=list(facts.sampling_fields),
            retention=RetentionBudget().to_mapping(),
        )

    def _surroundings(self) -> Surroundings:
        _ = self.registry
        assert self._around is not None  # noqa: S101 - there is a registry, so it has been started
        return self._around

    def _facts(self) -> EngineFacts:
        return self._surroundings().engine.facts()

    async def _watch(self) -> None:
        """Notice what ends by itself: silent sessions, failed ones, old memories."""
        reaped_s = self._clock()
        while True:
            await asyncio.sleep(min(_WATCH_PERIOD_S, self.settings.reaper_period_s))
            is_due = self._clock() - reaped_s >= self.settings.reaper_period_s
            if is_due:
                reaped_s = self._clock()
            try:
                self._look(reap=is_due)
            except Exception as error:  # noqa: BLE001 - without a watcher nobody would notice a dead engine
                self._surroundings().log.error(events.FAULT, exc_info=error)

    def _look(self, *, reap: bool) -> None:
        """Begin the ends that are due. Nothing is waited for: the next look must not be late."""
        self.registry.notice_ends()
        if reap:
            self.registry.forget()
            self.registry.end_silent()


def _model_errors(wanted: OpenRequest, facts: EngineFacts) -> Iterator[str]:
    """Yield why a session cannot have the model that is wanted."""
    if wanted.model is not None and wanted.model not in facts.model_names:
        names = " or ".join(facts.model_names)
        yield f"model: expected {names}, the one that this server serves, got {wanted.model[:_NUM_SHOWN]!r}"

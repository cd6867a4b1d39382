"""Our AsyncLLM as the HTTP frontend's engine: mappings in, replies out, mistakes found before anything is sent."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from kvpolicy.adapters.vllm.shared.log import log_fault
from kvpolicy.adapters.vllm.shared.options import EngineOptions
from kvpolicy.adapters.vllm.shared.sampling import SAMPLING_FIELDS, sampling_params_from
from kvpolicy.adapters.vllm.v0_28.frontend.async_llm import DEFAULT_REPLY_TOKENS
from kvpolicy.adapters.vllm.v0_28.startup.position_limit import position_limit
from kvpolicy.core.budget import RetentionBudget, SessionLimits, admission_errors, most_blocks
from kvpolicy.core.checks import reject
from kvpolicy.core.errors import ChunkRefusedError, PolicyUsageError
from kvpolicy.core.session_port import EngineFacts, ImageTurn

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from vllm.sampling_params import SamplingParams

    from kvpolicy.adapters.vllm.shared.session import Session
    from kvpolicy.adapters.vllm.v0_28.frontend.async_llm import AsyncLLM
    from kvpolicy.adapters.vllm.v0_28.frontend.chat import ChatFormat
    from kvpolicy.core.replies import Reply, SessionStats

# How long the end of an engine waits for sessions to be closed.
_STOP_S = 20
_SAMPLING_DEFAULTS: Mapping[str, Any] = MappingProxyType({"temperature": 0.0, "max_tokens": DEFAULT_REPLY_TOKENS})


@frozen(kw_only=True)
class OpenSession:
    """One session. Satisfies ``adapters.http.port.SessionPort``."""

    retention: Mapping[str, Any] | None
    max_blocks: int
    _session: Session
    _engine: SessionEngine

    async def push(
        self,
        turn: str | ImageTurn,
        *,
        sampling: Mapping[str, Any] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Feed one chunk and return its reply."""
        if isinstance(turn, ImageTurn):
            raise PolicyUsageError(f"turn: {self._engine.facts().model} takes text only, got an image")
        params = None if sampling is None else self._engine.sampling_params(sampling)
        return await self._session.push(turn, sampling_params=params, on_text=on_text)

    @property
    def has_ended(self) -> bool:
        """Whether every further push would raise."""
        return self._session.has_ended

    def stats(self) -> SessionStats:
        """Return its counts as of the last reply."""
        return self._session.stats()

    async def close(self) -> None:
        """End it and wait until the engine has let go of it."""
        await self._session.close()


class SessionEngine:
    """A started engine. Satisfies ``adapters.http.port.EnginePort``."""

    def __init__(
        self, engine: AsyncLLM, model_names: Iterable[str] = (), chat_format: ChatFormat | None = None
    ) -> None:
        """Read the facts off the engine: they do not change.

        ``model_names`` are all of the server: an engine keeps the first. ``chat_format`` is that of its chat route.
        """
        self._engine = engine
        self._chat_format = chat_format
        # The tokenizer is copied now, which takes long, and not while there is traffic.
        engine.turn_encoder(None, use_chat_template=False)
        config = engine.vllm_config
        # vLLM adds up the blocks of its data-parallel engines, and each keeps one (the null block) for itself.
        num_engines = config.parallel_config.data_parallel_size
        num_pool_blocks = int(config.cache_config.num_gpu_blocks) - num_engines
        options = EngineOptions.from_config(config)
        self._limits = SessionLimits(
            block_size=int(config.cache_config.block_size),
            context_limit=int(config.model_config.max_model_len),
            trained_range=position_limit(config),
            num_pool_blocks=num_pool_blocks // num_engines,
        )
        self._facts = EngineFacts(
            model_names=tuple(dict.fromkeys((str(config.model_config.served_model_name), *model_names))),
            block_size=self._limits.block_size,
            context_limit=self._limits.context_limit,
            trained_range=self._limits.trained_range,
            num_pool_blocks=num_pool_blocks,
            max_sessions=options.max_sessions or int(config.scheduler_config.max_num_seqs) - 1,
            takes_images=False,
            sampling_fields=SAMPLING_FIELDS,
        )

    def facts(self) -> EngineFacts:
        """Return what the engine offers."""
        return self._facts

    async def open_session(
        self,
        *,
        system_prompt: str | None,
        retention: Mapping[str, Any] | None,
        sampling: Mapping[str, Any],
        priority: int,
    ) -> OpenSession:
        """Return a session whose budget this engine can serve.

        Raises:
            PolicyUsageError: every reason why such a session cannot be.
        """
        reasons: list[str] = []
        budget = None
        max_tokens = DEFAULT_REPLY_TOKENS
        params = None
        try:
            params = self.sampling_params(sampling)
            max_tokens = params.max_tokens
        except PolicyUsageError as error:
            reasons += error.reasons
        try:
            budget = await self._budget(system_prompt, retention, max_tokens)
        except PolicyUsageError as error:
            reasons += error.reasons
        if reasons:
            raise PolicyUsageError(dict.fromkeys(reasons))
        in_force = None if budget is None else budget.to_mapping()
        session = self._engine.open_session(
            system_prompt=system_prompt,
            retention=in_force,
            sampling_params=params,
            chat_format=self._chat_format,
            priority=priority,
        )
        if budget is not None:
            session.check_first = partial(self._require_fit, budget)
        return OpenSession(
            retention=in_force, max_blocks=most_blocks(budget, self._limits), session=session, engine=self
        )

    async def _budget(
        self, system_prompt: str | None, retention: Mapping[str, Any] | None, max_tokens: int | None
    ) -> RetentionBudget | None:
        """Return the budget that a session would have, with its total; None without retention.

        Raises:
            PolicyUsageError: every reason why the engine cannot serve it.
        """
        if retention is None:
            return None
        budget = RetentionBudget.from_mapping(retention).resolved(self._limits, max_tokens)
        total = budget.require_total()
        encoder = self._engine.turn_encoder(system_prompt, chat_format=self._chat_format, most_tokens=total)
        reasons, first_chunk = [], 1
        try:
            # The shortest turn there is: what is too long even so can be said now.
            first_chunk = len(await encoder.encode_aside("-"))
        except ChunkRefusedError:
            reasons.append(
                f"system_prompt: expected fewer than {encoder.max_chars} characters (more never fit into "
                f"retention.total_tokens {total}), got {len(system_prompt or '')}"
            )
        reasons += admission_errors(budget, self._limits, first_chunk_tokens=first_chunk, max_tokens=max_tokens)
        reject(reasons)
        return budget

    def _require_fit(self, budget: RetentionBudget, num_tokens: int, params: SamplingParams) -> None:
        """Check what the engine will check of a session's first chunk, and would end the session for.

        Raises:
            ChunkRefusedError: the chunk and its reply do not fit into the budget.
        """
        reasons = admission_errors(budget, self._limits, first_chunk_tokens=num_tokens, max_tokens=params.max_tokens)
        if reasons:
            raise ChunkRefusedError("chunk_too_long", "\n".join(reasons))

    def sampling_params(self, sampling: Mapping[str, Any]) -> SamplingParams:
        """Return vLLM's parameters; what is left out: greedy, at most 24 tokens.

        Raises:
            PolicyUsageError: every reason why there are no such parameters.
        """
        return self._engine.checked_session_params(sampling_params_from(sampling, defaults=_SAMPLING_DEFAULTS))

    def failure(self) -> str | None:
        """Return why the engine is dead; None while it lives."""
        return "the engine process has ended; its log says why" if self._engine.errored else None


def awaited_from_elsewhere(stop: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Return a hook for ``AsyncLLM.call_before_shutdown`` that runs ``stop`` in the loop that is running now.

    On a signal vLLM stops its engine in a thread of the pool, before it stops to serve, and that thread waits until
    the sessions are closed. Called in the loop's own thread the hook does nothing: it would wait for itself.
    """
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    def hook() -> None:
        if threading.get_ident() == thread:
            return
        try:
            asyncio.run_coroutine_threadsafe(stop(), loop).result(_STOP_S)
        except Exception:  # noqa: BLE001 - the engine has to stop all the same
            log_fault("sessions.not_closed")

    return hook

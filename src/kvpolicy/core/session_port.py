"""What a frontend needs from an engine with sessions. The vLLM adapter implements it; tests have a fake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpolicy.core.replies import Reply, SessionStats


@frozen(kw_only=True)
class ImageTurn:
    """One frame: a decoded image (``PIL.Image.Image``) and the text that goes with it."""

    image: Any
    text: str = ""


@frozen(kw_only=True)
class EngineFacts:
    """What an engine offers: limits in tokens and blocks, and whether its model takes images.

    ``model_names`` are all that its model is served under; answers have the first, ``model``. ``sampling_fields`` are
    the names of the sampling parameters that a request may bring (a session may still refuse some of their values).
    ``num_pool_blocks`` is what all requests share, over all data-parallel engines.
    """

    model_names: tuple[str, ...]
    block_size: int
    context_limit: int
    trained_range: int
    num_pool_blocks: int
    max_sessions: int
    takes_images: bool
    sampling_fields: tuple[str, ...]

    @property
    def model(self) -> str:
        """The name that answers and metrics have."""
        return self.model_names[0]


class SessionPort(Protocol):
    """One open session."""

    @property
    def retention(self) -> Mapping[str, Any] | None:
        """The budgets in force, with their defaults resolved; None: nothing is ever evicted."""
        ...

    @property
    def max_blocks(self) -> int:
        """The most blocks that it can ever hold: its share in the admission sum."""
        ...

    async def push(
        self,
        turn: str | ImageTurn,
        *,
        sampling: Mapping[str, Any] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Feed one chunk and return its reply; ``on_text`` gets the pieces of its text as they come.

        ``sampling`` (fields of vLLM's ``SamplingParams``) is for this chunk instead of the session's.

        Raises:
            PolicyUsageError: bad input: nothing was sent; or the session was not admitted, and has ended.
            ChunkRefusedError: the chunk cannot be taken in; the session goes on without it.
            SessionClosedError: it is closed.
            SessionFailedError: the engine ended it.
        """
        ...

    @property
    def has_ended(self) -> bool:
        """Whether every further push would raise."""
        ...

    def stats(self) -> SessionStats:
        """Return its counts as of the last reply."""
        ...

    async def close(self) -> None:
        """End it and wait until the engine has let go of it. Calling it again does nothing."""
        ...


class EnginePort(Protocol):
    """An engine with sessions."""

    def facts(self) -> EngineFacts:
        """Return what the engine offers."""
        ...

    async def open_session(
        self,
        *,
        system_prompt: str | None,
        retention: Mapping[str, Any] | None,
        sampling: Mapping[str, Any],
        priority: int,
    ) -> SessionPort:
        """Return a session. The engine hears of it with its first chunk; the loop goes on meanwhile.

        ``retention`` has the budgets that were asked for; what is left out has the engine's defaults.

        Raises:
            PolicyUsageError: every reason why such a session cannot be.
        """
        ...

    def failure(self) -> str | None:
        """Return why the engine is dead; None while it lives."""
        ...

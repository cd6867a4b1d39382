"""What a server needs from whatever makes routes for its sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kvpolicy.core.session_port import EnginePort


class FrontendPort(Protocol):
    """Routes for sessions in an application."""

    def attach(self, app: FastAPI) -> None:
        """Add the routes; until ``start`` they answer that there is no engine yet."""
        ...

    def start(self, engine: EnginePort) -> None:
        """Serve the sessions of an engine."""
        ...

    async def stop(self) -> None:
        """Close every session. Calling it again does nothing."""
        ...

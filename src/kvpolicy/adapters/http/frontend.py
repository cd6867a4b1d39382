"""The session frontend: the service, with its routes for a FastAPI application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.adapters.http.log import hide_session_ids
from kvpolicy.adapters.http.page import make_page_router
from kvpolicy.adapters.http.routes import make_router
from kvpolicy.adapters.http.service import SessionService

if TYPE_CHECKING:
    from fastapi import FastAPI


class SessionFrontend(SessionService):
    """Sessions over HTTP, for any application."""

    def attach(self, app: FastAPI) -> None:
        """Add the routes. Until ``start`` they answer 503. The access log of uvicorn shows no whole id of theirs."""
        hide_session_ids()
        app.include_router(make_router(self))
        app.include_router(make_page_router())

"""The session console: a page and its parts, served from the package under rules that keep other hosts out."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response

from kvpolicy.adapters.http.session_route import SessionRoute

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# vLLM's ``--api-key`` guards whatever lies under /v1, and a browser cannot send a key with an address. The page holds
# no secret and asks for the key, which each of its calls then carries: so it also lies where it can be loaded.
_PREFIXES = ("/v1/streaming", "/streaming")
_PARTS = {
    "console": ("console.html", "text/html"),
    "console.css": ("console.css", "text/css"),
    "console.js": ("console.js", "text/javascript"),
    "console-api.js": ("console-api.js", "text/javascript"),
    "console-draw.js": ("console-draw.js", "text/javascript"),
    "console-turns.js": ("console-turns.js", "text/javascript"),
}
# No other host, no inline script, no frame around it, and nothing that it says where it came from.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def make_page_router() -> APIRouter:
    """Return the routes of the page, which are in no schema."""
    router = APIRouter(route_class=SessionRoute, include_in_schema=False)
    folder = files(__package__).joinpath("static")
    for path, (name, media_type) in _PARTS.items():
        text = folder.joinpath(name).read_text(encoding="utf-8")
        for prefix in _PREFIXES:
            router.add_api_route(f"{prefix}/{path}", _serving(text, media_type), methods=["GET"], response_model=None)
    return router


def _serving(text: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def serve() -> Response:
        return Response(text, media_type=media_type, headers=_HEADERS)

    return serve

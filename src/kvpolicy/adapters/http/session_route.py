"""What every session route does first and last: the routing key, and errors in the one shape.

It is a route class, not middleware or exception handlers: the server's other routes keep vLLM's own ways.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from fastapi.dependencies.utils import get_flat_dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvpolicy.adapters.http import log as events
from kvpolicy.adapters.http.errors import ApiError, api_error, bad_request, internal_error, invalid_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fastapi import Request

ROUTING_HEADER = "X-Session-ID"
ROUTING_KEY = r"^[A-Za-z0-9._~:-]{1,128}$"
# What nobody will read: the client has gone. nginx has made the number known.
_CLIENT_CLOSED = 499


class SessionRoute(APIRoute):
    """A route whose errors have the shape of ``ErrorBody`` and that echoes the routing key of its request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler inside what is common to all."""
        handle = super().get_route_handler()
        known = self._query_names()

        async def handle_at_the_edge(request: Request) -> Response:
            echoed: dict[str, str] = {}
            try:
                echoed = _routing_key(request)
                response = await handle(request)
            except ClientDisconnect:
                return Response(status_code=_CLIENT_CLOSED)
            except RequestValidationError as error:
                return invalid_fields(error.errors(), known).response(echoed)
            except Exception as error:  # noqa: BLE001 - the last place where an error can get the one shape
                return _answer_to(error).response(echoed)
            response.headers.update(echoed)
            return response

        return handle_at_the_edge

    def _query_names(self) -> tuple[str, ...]:
        """Return what may be in the query: the fields of the route's model of it."""
        models: list[Any] = [each.field_info.annotation for each in get_flat_dependant(self.dependant).query_params]
        return tuple(name for model in models for name in model.model_fields)


def _answer_to(error: Exception) -> ApiError:
    known = api_error(error)
    if known is not None:
        return known
    events.make_logger().error(events.FAULT, exc_info=error)
    return internal_error(error)


def _routing_key(request: Request) -> dict[str, str]:
    """Return the header to be echoed, if there is one."""
    keys = request.headers.getlist(ROUTING_HEADER)
    if not keys:
        return {}
    if len(keys) == 1 and re.fullmatch(ROUTING_KEY, keys[0]):
        return {ROUTING_HEADER: keys[0]}
    raise bad_request(
        "bad_routing_key",
        f"{ROUTING_HEADER}: expected one value of 1 to 128 letters, digits or . _ ~ : - characters, "
        f"got {len(keys)} of {len(keys[0])} characters",
    )

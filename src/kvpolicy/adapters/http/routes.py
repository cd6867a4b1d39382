"""The session routes: what is read from a request and handed to the service, and the OpenAPI text."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response, Security
from fastapi.security import HTTPBearer
from starlette.requests import ClientDisconnect

from kvpolicy.adapters.http.bodies import may_name_an_index, read_frame, read_open_request
from kvpolicy.adapters.http.frontend_context import NOTHING_PUSHED, READING_A_FRAME
from kvpolicy.adapters.http.responses import EventStream, whole_reply, with_presence
from kvpolicy.adapters.http.schemas import (
    CloseReply,
    ConfigReply,
    ErrorBody,
    FrameReply,
    FrameTurn,
    NoQuery,
    OpenReply,
    OpenRequest,
    PushQuery,
    StatusReply,
)
from kvpolicy.adapters.http.session_route import ROUTING_HEADER, ROUTING_KEY, SessionRoute

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvpolicy.adapters.http.service import SessionService

PREFIX = "/v1/streaming"

SessionId = Annotated[str, Path(description="What opening the session returned. Unknown and malformed ids look alike.")]


def _routing_key(
    key: Annotated[
        str | None,
        Header(
            alias=ROUTING_HEADER,
            description="A routing key of the client's choice, the same at open and on every later call, so that a "
            "router with consistent hashing keeps a session on its server. It is echoed. It authorises nothing.",
            pattern=ROUTING_KEY,
        ),
    ] = None,
) -> str | None:
    """Describe the header; ``SessionRoute`` reads it."""
    return key


def _no_query(query: Annotated[NoQuery, Query()]) -> NoQuery:
    """Refuse whatever is in the query."""
    return query


_TAKES_NO_QUERY = (Depends(_no_query),)

# For the schema only: the server in front of the routes checks the key, if it was given one.
_KEY = HTTPBearer(
    scheme_name="api_key", description="What the server was started with as `--api-key`.", auto_error=False
)
_OR_NO_KEY: dict[str, Any] = {"security": [{}]}


def make_router(service: SessionService) -> APIRouter:
    """Return the routes of a service."""
    router = APIRouter(
        prefix=PREFIX,
        route_class=SessionRoute,
        tags=["streaming sessions"],
        dependencies=[Depends(_routing_key), Security(_KEY)],
    )
    settings = service.settings

    @router.post(
        "/sessions",
        status_code=201,
        response_model=OpenReply,
        responses=_errors(400, 413, 422, 500, 503),
        openapi_extra=_OR_NO_KEY | _body({"application/json": _schema(OpenRequest)}, required=False),
        dependencies=_TAKES_NO_QUERY,
        summary="Open a session",
    )
    async def open_session(request: Request) -> OpenReply:
        """Open a session that can be fed chunk by chunk for as long as you like, in constant memory.

        The engine hears of it with its first chunk. It ends when you close it, when you disconnect while a reply is
        pending, when it is idle for too long, or when the engine fails. 503 with `Retry-After`: there is no room now,
        and the message says what is taken.
        """
        service.require_running()
        with service.bodies.taken_by(request):
            async with service.enqueue_deadline("body: reading it", "nothing was opened, try again"):
                wanted = await read_open_request(request, settings.max_body_bytes)
            # Within the same room: a long system prompt is still held while it waits to be made into tokens.
            reply, is_there = await with_presence(service.open(wanted), request.receive)
        if not is_there:
            service.registry.abandon(reply.session_id)
            raise ClientDisconnect
        return reply

    async def push(
        request: Request,
        session_id: SessionId,
        query: Annotated[PushQuery, Query()],
    ) -> FrameReply | Response:
        """Push one chunk, wait for its reply, and return it with its figures. One chunk is in flight per session.

        The body is text (`text/plain`), JSON, one JPEG or PNG file, or a form with a file `image` and a `text`.

        With `frame_index` a push can be repeated after a broken connection: the index of the last answered chunk gets
        the same reply again, that of the pending chunk waits for it. Every other index but the next one is answered
        with 409, and so is a second chunk while one is pending; neither disturbs the session. A chunk that is refused
        (400, 413, 422) has no index: the session is as it was, and the next chunk gets it.

        If you disconnect before the reply is complete, or if it takes too long (503), the session is closed.

        With `stream` the answer is a stream of server-sent events: `data: {"text": ...}` for each piece, then
        `event: reply` with the whole answer, or `event: error` with an error. An error before the first piece is an
        ordinary answer with its own status.
        """
        service.require_running()
        session = service.registry.find(session_id)
        deadline_s = asyncio.get_running_loop().time() + settings.enqueue_deadline_s
        if query.frame_index is None and not may_name_an_index(request):
            session.require_nothing_pending()
        with service.bodies.taken_by(request):
            async with service.enqueue_deadline(READING_A_FRAME, NOTHING_PUSHED):
                frame = await read_frame(request, settings.max_body_bytes, index=query.frame_index, stream=query.stream)
            if frame.image is not None:
                service.require_images()
            service.require_running()  # the body may have come across the end
            waiter = session.submit(frame, deadline_s=deadline_s)
        return EventStream(waiter) if frame.stream else await whole_reply(waiter, request.receive)

    for path, is_shown in (("frame", True), ("frames", False)):
        router.add_api_route(
            f"/sessions/{{session_id}}/{path}",
            push,
            methods=["POST"],
            response_model=FrameReply,
            responses={200: _EVENT_STREAM, **_errors(400, 404, 409, 413, 422, 500, 503)},
            openapi_extra=_OR_NO_KEY | _body(_FRAME_BODIES),
            summary="Push a chunk (also as `/frames`)",
            operation_id=f"push_{path}",
            include_in_schema=is_shown,
        )

    @router.get(
        "/sessions/{session_id}",
        response_model=StatusReply,
        responses=_errors(400, 404, 422, 500, 503),
        openapi_extra=_OR_NO_KEY,
        dependencies=_TAKES_NO_QUERY,
        summary="See what a session holds",
    )
    async def session_status(session_id: SessionId) -> StatusReply:
        """Return the counts of a session and what it remembers, as of its last reply.

        One that has ended is shown for a while with the reason. Nothing lists the sessions of a server.
        """
        service.require_running()
        return service.registry.status(session_id)

    @router.delete(
        "/sessions/{session_id}",
        response_model=CloseReply,
        responses=_errors(400, 404, 422, 500, 503),
        openapi_extra=_OR_NO_KEY,
        dependencies=_TAKES_NO_QUERY,
        summary="Close a session",
    )
    async def close_session(session_id: SessionId) -> CloseReply:
        """Close a session and wait until the engine has let go of it. A push that is pending is answered with 409."""
        service.require_running()
        return await service.registry.close(session_id)

    @router.get(
        "/config",
        response_model=ConfigReply,
        responses=_errors(400, 422, 500, 503),
        openapi_extra=_OR_NO_KEY,
        dependencies=_TAKES_NO_QUERY,
        summary="Defaults and limits",
    )
    async def config() -> ConfigReply:
        """Return what a session has where its opener asks for nothing, and what this server and its engine allow."""
        service.require_running()
        return service.config()

    return router


_TITLES = {
    400: "The request makes no sense here; every reason is listed.",
    404: "No such session.",
    409: "A chunk is pending, the index is not the next one, or the session has ended.",
    413: "The body, the image or the chunk is too large.",
    422: "A field has the wrong type, or is unknown.",
    500: "A fault of the server.",
    503: "No room, a deadline passed, or the engine is not there.",
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody, "description": _TITLES[status]} for status in statuses}


def _body(content: dict[str, dict[str, Any]], *, required: bool = True) -> dict[str, Any]:
    described = {kind: {"schema": schema} for kind, schema in content.items()}
    return {"requestBody": {"required": required, "content": described}}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's schema in one piece: the bodies are read by us, so FastAPI does not know their models."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(node, dict):
            name = node.get("$ref", "").rpartition("/")[2]
            rest = {key: inlined(value) for key, value in node.items() if key != "$ref"}
            return {**inlined(definitions[name]), **rest} if name else rest
        return [inlined(item) for item in node] if isinstance(node, list) else node

    whole: dict[str, Any] = inlined(schema)
    return whole


_BINARY = {"type": "string", "format": "binary"}
_FRAME_BODIES: dict[str, dict[str, Any]] = {
    "text/plain": {"type": "string", "minLength": 1, "example": "What has changed?"},
    "application/json": _schema(FrameTurn),
    "image/jpeg": _BINARY,
    "image/png": _BINARY,
    "multipart/form-data": {
        "type": "object",
        "required": ["image"],
        "properties": {
            "image": {**_BINARY, "description": "A JPEG or PNG file."},
            "text": {"type": "string", "description": "What is said or asked about it."},
            "sampling": {"type": "string", "description": "Sampling parameters for this chunk, as a JSON object."},
        },
    },
}
_EVENT: dict[str, Any] = {
    "type": "object",
    "description": "One event.",
    "required": ["data"],
    "properties": {
        "event": {
            "enum": ["message", "reply", "error"],
            "description": "Left out (which means message) for a piece of text; reply is the last of a good stream.",
        },
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "description": '`{"text": ...}`, a whole reply, or an error.',
        },
    },
}
_EVENT_STREAM: dict[str, Any] = {
    "description": "The reply; with `stream`, as server-sent events.",
    "content": {
        "text/event-stream": {
            "schema": _EVENT,
            "example": 'data: {"text": "A cat."}\n\nevent: reply\ndata: {"frame_index": 0, ...}\n\n',
        }
    },
}

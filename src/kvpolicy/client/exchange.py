"""Requests and answers without a connection: what the synchronous and the asynchronous client have in common."""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING, Any

import httpx
from attrs import frozen

from kvpolicy.client.errors import SessionConnectionError, error_of
from kvpolicy.client.values import FrameReply
from kvpolicy.core.errors import PolicyUsageError, SessionFailedError
from kvpolicy.core.session_ids import without_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SESSIONS = "/v1/streaming/sessions"
UNKNOWN_SESSION = "unknown_session"
# A router's word, not the server's: nobody listens where the routing key leads to.
SERVER_UNREACHABLE = "server_unreachable"
# Where nine of ten servers are gone, so many random keys all lead to them once in 850 openings; of two, never.
_NUM_KEYS = 64
# A server that is gone with its host costs a router's time-out for each key.
_OPENING_S = 10.0
# A reply may be as late as the server's deadlines for reading and answering allow: 120 s each by default.
DEFAULT_TIMEOUT = httpx.Timeout(connect=10.0, write=120.0, read=250.0, pool=10.0)
# What breaks a connection that was there, as opposed to a server that is late: the server itself waits no longer then.
BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError)
_MAGIC = ((b"\xff\xd8\xff", "image/jpeg"), (b"\x89PNG\r\n\x1a\n", "image/png"))


class Unset:
    """Tells "the server's default" from None, which is a value."""


UNSET = Unset()


@frozen
class Call:
    """One request, ready to be sent, perhaps twice."""

    method: str
    path: str
    options: Mapping[str, Any]


def client_headers(api_key: str | None) -> dict[str, str]:
    """Return what every request of a client has."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def routing_keys(chosen: str | None) -> Iterator[str]:
    """Yield the values of ``X-Session-ID`` to try, one session each: the caller's choice, or else random ones.

    They help a router and authorise nothing. Random ones end after 64, or after ten seconds.
    """
    if chosen is not None:
        yield chosen
        return
    deadline_s = time.monotonic() + _OPENING_S
    for _ in range(_NUM_KEYS):
        yield secrets.token_urlsafe(12)
        if time.monotonic() > deadline_s:
            return


def another_key(error: SessionFailedError, keys: Iterator[str]) -> str:
    """Return the next key to try.

    Raises:
        SessionFailedError: the error itself, where no other key may help. A key leads to the same server always.
    """
    key = next(keys, None) if error.code == SERVER_UNREACHABLE else None
    if key is None:
        raise error
    return key


def open_call(  # noqa: PLR0913 - one keyword for each option of the route
    routing_key: str,
    *,
    system_prompt: str | None,
    retention: Mapping[str, Any] | Unset | None,
    sampling: Mapping[str, Any] | Unset,
    priority: int,
    model: str | None,
) -> Call:
    """Return the request that opens a session; what is unset is left to the server."""
    body: dict[str, Any] = {"system_prompt": system_prompt, "priority": priority, "model": model}
    if not isinstance(retention, Unset):
        body["retention"] = None if retention is None else dict(retention)
    if not isinstance(sampling, Unset):
        body["sampling"] = dict(sampling)
    return Call("POST", SESSIONS, {"json": body, "headers": _routed(routing_key)})


def session_call(method: str, session_id: str, routing_key: str) -> Call:
    """Return the request that asks for a session's status or closes it."""
    return Call(method, f"{SESSIONS}/{session_id}", {"headers": _routed(routing_key)})


def push_call(  # noqa: PLR0913 - one argument for each part of it
    session_id: str,
    routing_key: str,
    turn: str | bytes,
    *,
    text: str,
    sampling: Mapping[str, Any] | None,
    index: int,
    stream: bool,
) -> Call:
    """Return the request that pushes a chunk under its index.

    Raises:
        PolicyUsageError: it is neither text nor an encoded image, or it has two texts.
    """
    path = f"{SESSIONS}/{session_id}/frame"
    query: dict[str, Any] = {"frame_index": index} | ({"stream": True} if stream else {})
    common = {"params": query, "headers": _routed(routing_key)}
    if isinstance(turn, str):
        if text:
            raise PolicyUsageError("text: expected none beside a turn of text; it goes with an image")
        body = {"text": turn} if sampling is None else {"text": turn, "sampling": dict(sampling)}
        return Call("POST", path, {"json": body, **common})
    fields = {"text": text} if text else {}
    if sampling is not None:
        fields["sampling"] = json.dumps(dict(sampling))
    return Call("POST", path, {"files": {"image": ("frame", turn, _image_type(turn))}, "data": fields, **common})


def checked(answer: httpx.Response) -> Any:  # noqa: ANN401 - JSON
    """Return the JSON of an answer that has been read.

    Raises:
        KVPolicyError: the answer is an error, or no JSON.
    """
    try:
        body = answer.json()
    except ValueError:
        body = answer.text
    if answer.is_success and isinstance(body, dict):
        return body
    raise error_of(answer.status_code, body)


def connection_error(error: httpx.HTTPError, call: Call) -> SessionConnectionError:
    """Return what is raised where there was no whole answer. Its text may be logged, so it has no whole id."""
    return SessionConnectionError(without_ids(f"{call.method} {call.path}: {type(error).__name__}: {error}"))


class EventReader:
    """Server-sent events, line by line: pieces of text, then the reply or an error."""

    def __init__(self) -> None:
        self.reply: FrameReply | None = None
        self._name = ""
        self._data: list[str] = []

    def feed(self, line: str) -> str | None:
        """Take one line without its end; return a piece of text if it completes one.

        Raises:
            KVPolicyError: the event is an error.
        """
        if line:
            field, _, value = line.partition(":")
            if field == "event":
                self._name = value.removeprefix(" ")
            elif field == "data":
                self._data.append(value.removeprefix(" "))
            return None
        name, data, self._name, self._data = self._name, self._data, "", []
        if not data:
            return None
        body = json.loads("\n".join(data))
        if name == "error":
            raise error_of(200, body)
        if name == "reply":
            self.reply = FrameReply.from_json(body)
            return None
        return str(body["text"]) if name == "" else None

    def require_reply(self) -> FrameReply:
        """Return the reply at the end of the stream.

        Raises:
            SessionConnectionError: the stream ended without one.
        """
        if self.reply is None:
            raise SessionConnectionError("stream: it ended before the reply was complete")
        return self.reply


def _routed(routing_key: str) -> dict[str, str]:
    return {"X-Session-ID": routing_key}


def _image_type(data: bytes) -> str:
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    raise PolicyUsageError("turn: expected text, or the bytes of a JPEG or PNG file; these begin like neither")

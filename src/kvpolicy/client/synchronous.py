"""The synchronous client: change the other one, then make_sync_client.py writes it."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Self

import httpx

from kvpolicy.client.errors import SessionApiError, SessionConnectionError
from kvpolicy.client.exchange import (
    BROKEN,
    DEFAULT_TIMEOUT,
    UNKNOWN_SESSION,
    UNSET,
    Call,
    EventReader,
    another_key,
    checked,
    client_headers,
    connection_error,
    open_call,
    push_call,
    routing_keys,
    session_call,
)
from kvpolicy.client.values import FrameReply, OpenedSession, SessionStatus
from kvpolicy.core.errors import KVPolicyError, PolicyUsageError, SessionFailedError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from kvpolicy.client.exchange import Unset


class _Line:
    """The way to the server that a client and its sessions share."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def ask(self, call: Call, *, num_tries: int = 1) -> Any:  # noqa: ANN401 - JSON
        """Return the JSON of the answer; send again only where the connection broke."""
        while True:
            num_tries -= 1
            try:
                return checked(self.http.request(call.method, call.path, **call.options))
            except httpx.HTTPError as error:
                if num_tries == 0 or not isinstance(error, BROKEN):
                    raise connection_error(error, call) from error

    def lines(self, call: Call) -> Generator[str]:
        """Yield the lines of the answer; send again only where the connection broke before the first."""
        is_last_try = False
        while True:
            has_begun = False
            try:
                with self.http.stream(call.method, call.path, **call.options) as answer:
                    if not answer.is_success:
                        answer.read()
                        checked(answer)
                    for line in answer.iter_lines():
                        has_begun = True
                        yield line
            except httpx.HTTPError as error:
                if is_last_try or has_begun or not isinstance(error, BROKEN):
                    raise connection_error(error, call) from error
                is_last_try = True
            else:
                return


class SessionClient:
    """A connection to a server. Use it as a context manager, or call ``close``.

    One client serves many sessions, one after the other or in threads.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: httpx.Timeout | float = DEFAULT_TIMEOUT,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Prepare a client; nothing is sent.

        Args:
            base_url: of the server, without ``/v1``.
            api_key: what the server was started with as ``--api-key``.
            timeout: seconds, or one for each phase. The default waits for a reply as long as the server's defaults do.
            transport: how requests are sent, for proxies and tests.
        """
        http = httpx.Client(base_url=base_url, headers=client_headers(api_key), timeout=timeout, transport=transport)
        self._line = _Line(http)

    def open(  # noqa: PLR0913 - one keyword for each option of the route
        self,
        *,
        system_prompt: str | None = None,
        retention: Mapping[str, Any] | Unset | None = UNSET,
        sampling: Mapping[str, Any] | Unset = UNSET,
        priority: int = 0,
        model: str | None = None,
        routing_key: str | None = None,
    ) -> Session:
        """Open a session; use it as a context manager, or call its ``close``.

        Args:
            system_prompt: comes before the first chunk and stays.
            retention: budgets; unset: the server's defaults; None: nothing is ever evicted.
            sampling: sampling parameters of chunks that bring none; unset: the server's defaults.
            priority: a smaller number is more important.
            model: if given, it must be the one that the server serves.
            routing_key: the value of ``X-Session-ID`` on every call of this session; unset: a random one, and another
                where a router says that nobody listens there.

        Raises:
            KVPolicyError: see ``kvpolicy.client.errors``.
        """
        keys = routing_keys(routing_key)
        key = next(keys)
        while True:
            call = open_call(
                key, system_prompt=system_prompt, retention=retention, sampling=sampling, priority=priority, model=model
            )
            try:
                return Session(self._line, OpenedSession.from_json(self._line.ask(call)), key)
            except SessionFailedError as error:
                key = another_key(error, keys)

    def close(self) -> None:
        """Close the connections. Sessions that are open stay so until the server finds them idle."""
        self._line.http.close()

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()


class Session:
    """An open session. ``opened`` says what the server has given it."""

    def __init__(self, line: _Line, opened: OpenedSession, routing_key: str) -> None:
        """Use a session that is open. ``SessionClient.open`` makes one."""
        self.id = opened.session_id
        self.opened = opened
        self.routing_key = routing_key
        self.last_reply: FrameReply | None = None
        self._line = line
        self._next_index = 0
        self._is_pushing = False
        # The chunk whose answer was lost on the way: the server may have it or not.
        self._lost: tuple[Any, ...] | None = None

    def push(self, turn: str | bytes, *, text: str = "", sampling: Mapping[str, Any] | None = None) -> FrameReply:
        """Push a chunk and return its reply.

        If the connection breaks, the same chunk is sent once more under the same index: the server answers it once
        only. That helps where the chunk had not come in whole, or the reply was complete; a reply that is interrupted
        ends the session (``SessionClosedError``). What is late is not sent again.

        Args:
            turn: text, or the bytes of a JPEG or PNG file.
            text: what goes with an image.
            sampling: sampling parameters for this chunk, over the session's own.

        Raises:
            KVPolicyError: see ``kvpolicy.client.errors``.
        """
        with self._place(turn, text, sampling) as index:
            call = self._push_call(turn, text, sampling, index=index, stream=False)
            return self._replied(FrameReply.from_json(self._line.ask(call, num_tries=2)))

    def stream(self, turn: str | bytes, *, text: str = "", sampling: Mapping[str, Any] | None = None) -> Generator[str]:
        """Push a chunk and yield the text of its reply piece by piece; afterwards ``last_reply`` is the whole.

        Arguments and errors are as in ``push``, and so is the second try, until the first piece has come. Leaving the
        loop early and closing the generator (``contextlib.closing``) disconnects, which closes the session.
        """
        with self._place(turn, text, sampling) as index:
            call = self._push_call(turn, text, sampling, index=index, stream=True)
            reader = EventReader()
            with closing(self._line.lines(call)) as lines:
                for line in lines:
                    if (piece := reader.feed(line)) is not None:
                        yield piece
            self._replied(reader.require_reply())

    def status(self) -> SessionStatus:
        """Return what the session holds."""
        call = session_call("GET", self.id, self.routing_key)
        return SessionStatus.from_json(self._line.ask(call, num_tries=2))

    def close(self) -> bool:
        """Close it; return whether the engine has let go of it. Closing what has ended does no harm."""
        call = session_call("DELETE", self.id, self.routing_key)
        try:
            return bool((self._line.ask(call, num_tries=2))["closed"])
        except SessionApiError as error:
            if error.code != UNKNOWN_SESSION:
                raise
            return True

    def __enter__(self) -> Self:
        """Return the session itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close it. An error of the block is not hidden by one of closing."""
        try:
            self.close()
        except KVPolicyError:
            if kind is None:
                raise

    @contextmanager
    def _place(self, *chunk: Any) -> Iterator[int]:  # noqa: ANN401 - what a push takes
        """Hold the place of the one chunk in flight; yield its index.

        Where the answer to the chunk before was lost, and this is another one, the server is asked how far it is. The
        same chunk again has the same index, and gets the answer that there was.
        """
        if self._is_pushing:
            raise PolicyUsageError("push: the reply to the chunk before is pending; one chunk is in flight at a time")
        self._is_pushing = True
        try:
            if self._lost not in (None, chunk):
                self._next_index = (self.status()).frames
            self._lost = chunk
            yield self._next_index
            self._lost = None
        except KVPolicyError as error:
            if not isinstance(error, SessionConnectionError):
                self._lost = None
            raise
        finally:
            self._is_pushing = False

    def _push_call(
        self, turn: str | bytes, text: str, sampling: Mapping[str, Any] | None, *, index: int, stream: bool
    ) -> Call:
        return push_call(self.id, self.routing_key, turn, text=text, sampling=sampling, index=index, stream=stream)

    def _replied(self, reply: FrameReply) -> FrameReply:
        self.last_reply = reply
        self._next_index = reply.frame_index + 1
        return reply

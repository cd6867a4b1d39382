"""The how-to's nginx in front of several servers: sessions stay put, and the death of a server costs its own only."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import httpx
import pytest

from kvpolicy.client import Session, SessionClient, SessionConnectionError
from kvpolicy.core.errors import PolicyUsageError, SessionFailedError
from tests.integration.router import require_nginx, routing
from tests.integration.server_process import ServerProcess, reserved_port, starting
from tests.pages import DOCS, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SESSIONS = "/v1/streaming/sessions"
NUM_SESSIONS, NUM_TURNS = 12, 10
# A reply takes seconds, so that it is still being made when its first piece has come, however slow the test is.
LONG_REPLY = 1600
# Nothing may take longer than this.
PATIENCE_S = 60
# Later flags win over those of every such server: there is room for all sessions on one of them, and for the budget
# of who names none.
FLAGS = ["--enable-streaming", "--max-num-seqs", "40", "--num-gpu-blocks-override", "900", "--max-model-len", "2048"]


# -- the configuration alone, in front of servers that say their port


class _SaysItsPort(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, _Listener)
        server.num_requests += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(server.server_port).encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        """Say nothing."""


class _Listener(ThreadingHTTPServer):
    num_requests = 0


@contextlib.contextmanager
def listening(port: int) -> Iterator[_Listener]:
    with _Listener(("127.0.0.1", port), _SaysItsPort) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(router: httpx.Client, key: str, path: str = SESSIONS) -> httpx.Response:
    return router.post(path, headers={"X-Session-ID": key})


@contextlib.contextmanager
def router_before(folder: Path, ports: list[int]) -> Iterator[httpx.Client]:
    with routing(folder, ports) as address, httpx.Client(base_url=address, timeout=PATIENCE_S) as client:
        yield client


def test_a_key_leads_to_one_server_and_a_new_server_takes_its_share_only(tmp_path: Path) -> None:
    keys = [f"key-{i}" for i in range(300)]
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(3)]
        for port in ports:
            stack.enter_context(listening(port))
        two = stack.enter_context(router_before(tmp_path / "two", ports[:2]))
        three = stack.enter_context(router_before(tmp_path / "three", ports))
        opens = [int(asked(two, key).text) for key in keys]
        pushes = [int(asked(two, key, f"{SESSIONS}/some-id/frame").text) for key in keys]
        after = [int(asked(three, key).text) for key in keys]
    assert opens == pushes
    assert all(opens.count(port) > 60 for port in ports[:2])
    moved = [new for old, new in zip(opens, after, strict=True) if old != new]
    assert set(moved) == {ports[2]}
    print(f"{len(moved)} of 300 keys have moved to the third server")
    assert 50 < len(moved) < 160


def test_nothing_goes_to_another_server_when_one_is_gone(tmp_path: Path) -> None:
    keys = [f"key-{i}" for i in range(40)]
    with (
        reserved_port() as gone,
        reserved_port() as alive,
        listening(alive) as server,
        router_before(tmp_path / "router", [gone, alive]) as router,
    ):
        # Twice: what has failed before is asked again all the same.
        first, second = ([asked(router, key) for key in keys] for _ in range(2))
        assert [answer.status_code for answer in first] == [answer.status_code for answer in second]
        failed = [answer for answer in first if answer.status_code == httpx.codes.BAD_GATEWAY]
        assert 5 < len(failed) < 35
        assert server.num_requests == 2 * (len(keys) - len(failed))
        for answer in failed:
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]["code"] == "server_unreachable"
        # It comes back, and has its own keys again.
        with listening(gone):
            third = [asked(router, key) for key in keys]
        for before, after in zip(first, third, strict=True):
            assert after.text == str(gone if before in failed else alive)
        # What is no session may go anywhere.
        assert {asked(router, "any", "/v1/completions").text for _ in range(6)} == {str(alive)}


def test_the_router_says_what_it_does_not_pass_on(tmp_path: Path) -> None:
    with (
        reserved_port() as port,
        listening(port) as server,
        router_before(tmp_path / "router", [port]) as router,
    ):
        without_key = router.post(SESSIONS)
        too_large = router.post(SESSIONS, headers={"X-Session-ID": "key"}, content=b"x" * 8_388_609)
        answers = [(answer.status_code, answer.json()["error"]["code"]) for answer in (without_key, too_large)]
        assert answers == [(400, "no_routing_key"), (413, "body_too_large")]
        assert router.get("/metrics").status_code == httpx.codes.NOT_FOUND
        assert server.num_requests == 0


# -- real servers; the order counts: the last test ends one


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    require_nginx()
    folder = tmp_path_factory.mktemp("servers")
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(starting(folder / f"log{i}", tiny_model, *FLAGS)) for i in range(2)]
        for server in found:
            server.wait_until_up()
        yield found


@pytest.fixture(scope="module")
def client(servers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionClient]:
    folder = tmp_path_factory.mktemp("nginx") / "router"
    with routing(folder, [server.port for server in servers]) as router, SessionClient(router) as client:
        yield client


@pytest.fixture(scope="module")
def sessions(client: SessionClient, servers: list[ServerProcess]) -> list[list[Session]]:
    """The sessions of each server: twelve in all, or as many more as it takes until each has three."""
    held: list[list[Session]] = [[] for _ in servers]
    while sum(map(len, held)) < NUM_SESSIONS or min(map(len, held)) < 3:
        session = opened(client)
        held[servers.index(server_of(session, servers))].append(session)
    return held


def opened(client: SessionClient) -> Session:
    return client.open(
        retention={"total_tokens": 256, "min_total_tokens": 64},
        sampling={"max_tokens": 4, "temperature": 0.0, "ignore_eos": True},
    )


def opened_for_a_long_reply(client: SessionClient) -> Session:
    return client.open(retention=None, sampling={"max_tokens": LONG_REPLY, "temperature": 0.0, "ignore_eos": True})


def server_of(session: Session, servers: list[ServerProcess]) -> ServerProcess:
    """Return the one server that knows a session."""
    [server] = [server for server in servers if state(session, server) is not None]
    return server


def state(session: Session, server: ServerProcess) -> str | None:
    """Return the state of a session as a server says it, asked directly; None: it does not know it."""
    answer = httpx.get(f"{server.url}{SESSIONS}/{session.id}", timeout=PATIENCE_S)
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None
    return str(answer.raise_for_status().json()["state"])


def num_chunks(server: ServerProcess) -> int:
    """Return how many chunks a server has answered."""
    metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    found = re.search(r"^kvpolicy:session_chunks_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


def test_every_session_stays_on_its_server(servers: list[ServerProcess], sessions: list[list[Session]]) -> None:
    for turn in range(NUM_TURNS):
        for session in (*sessions[0], *sessions[1]):
            assert session.push(f"line {turn}: the pump is running").frame_index == turn
    assert [num_chunks(server) for server in servers] == [NUM_TURNS * len(some) for some in sessions]
    print("sessions by server:", *(len(some) for some in sessions))


def test_the_commands_of_the_page_run(client: SessionClient) -> None:
    [commands] = [block.code for block in blocks(DOCS / "howto" / "scale-out.md") if "curl" in block.code]
    here = commands.replace("http://127.0.0.1:8080", str(client._line.http.base_url).rstrip("/"))
    assert here != commands
    command = ["/bin/sh", "-ec", here]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)  # noqa: S603 - our own text
    assert '"frame_index":0' in done.stdout
    assert '"closed":true' in done.stdout


def test_pieces_of_a_reply_come_while_it_is_made(client: SessionClient, servers: list[ServerProcess]) -> None:
    with opened_for_a_long_reply(client) as session:
        server = server_of(session, servers)
        pieces = session.stream("tell me more")
        next(pieces)
        assert state(session, server) == "pending"
        assert sum(1 for _ in pieces) > 20
        assert session.last_reply is not None
        assert session.last_reply.reply_tokens == LONG_REPLY


def test_who_leaves_the_router_leaves_the_server(client: SessionClient, servers: list[ServerProcess]) -> None:
    session = opened_for_a_long_reply(client)
    server = server_of(session, servers)
    pieces = session.stream("tell me more")
    next(pieces)
    pieces.close()
    deadline_s = time.monotonic() + PATIENCE_S
    while state(session, server) == "pending":
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert session.status().state == "ended"
    assert "disconnected" in str(session.status().reason)


def test_what_is_too_large_is_refused_by_the_router_in_the_servers_words(client: SessionClient) -> None:
    with opened(client) as session:
        with pytest.raises(PolicyUsageError, match="at most 8 MiB"):
            session.push("x" * 9_000_000)
        assert session.push("hi").frame_index == 0


def test_the_death_of_a_server_costs_its_own_sessions_only(
    client: SessionClient, sessions: list[list[Session]], servers: list[ServerProcess], tiny_model: Path
) -> None:
    doomed, alive = servers
    waiting, listening_in = (opened_on(doomed, client, servers) for _ in range(2))
    pieces = listening_in.stream("tell me more")
    next(pieces)
    # Its engine makes nothing more, so that both replies are under way when it dies.
    with ThreadPoolExecutor() as threads, doomed.standing_still():
        pending = threads.submit(waiting.push, "tell me more")
        while state(waiting, doomed) != "pending":
            assert not pending.done()
        killed_s = time.monotonic()
        doomed.kill()
        # Who waits is told at once, and so is who listens: half a reply is no reply.
        with pytest.raises(SessionFailedError, match="does not answer"):
            pending.result(PATIENCE_S)
        with pytest.raises(SessionConnectionError):
            list(pieces)
    for session in (*sessions[0], waiting, listening_in):
        with pytest.raises(SessionFailedError, match="open a new one") as failed:
            session.push("are you there?")
        assert failed.value.code == "server_unreachable"
    told_s = time.monotonic() - killed_s
    print(f"all told {told_s:.2f} s after the death")
    assert told_s < PATIENCE_S  # before any time-out of the router's or the clients'
    for turn in range(NUM_TURNS, NUM_TURNS + 3):
        assert {session.push("go on").frame_index for session in sessions[1]} == {turn}
    new = [opened(client) for _ in range(8)]
    assert all(state(session, alive) == "idle" for session in new)
    assert {session.push("hello").frame_index for session in new} == {0}
    body = {"model": str(tiny_model), "prompt": [5] * 20, "max_tokens": 3}
    answers = [client._line.http.post("/v1/completions", json=body) for _ in range(4)]
    assert {answer.status_code for answer in answers} == {httpx.codes.OK}
    assert all(session.close() for session in (*new, *sessions[1]))


def opened_on(server: ServerProcess, client: SessionClient, servers: list[ServerProcess]) -> Session:
    """Return a session of long replies on one of the servers."""
    while True:
        session = opened_for_a_long_reply(client)
        if server_of(session, servers) is server:
            return session
        session.close()

"""The server of ``make serve``, a real process with the demo model: the commands of the docs, load, and broken clients.

``pytest -s`` shows the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from attrs import define, evolve, field
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from kvpolicy import ChunkRefusedError
from kvpolicy.bench.models.smollm import FOLDER_NAME, cache_folder
from kvpolicy.client import AsyncSessionClient, FrameReply, SessionClient, SessionStatus
from tests.integration.server_process import ServerProcess, running
from tests.pages import ADDRESS, ROOT, Block, answer_after, makefile_flags, server_blocks, server_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODEL = "smollm2"
SESSIONS = "/v1/streaming/sessions"
PROMPT = "You watch a pump station. Answer in a few words."
# Small, so that most turns evict.
RETENTION = {"total_tokens": 512, "min_total_tokens": 256}
SHORT = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 2}

NUM_TURNS = 300
NUM_MEASURED = 50
NUM_SESSIONS, NUM_TURNS_EACH = 4, 12
# Turns are compared with ordinary requests made right after them, so that a machine that is busy in one stretch and not
# in the other does not count; the rest of the noise stays within a half. Without retention the same session, on an
# engine with a longer context, is 3.5 times as slow at 7255 tokens (turn 210) as at 1000.
MAX_GROWTH = 1.5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start what ``make serve`` starts, on a free port."""
    folder = cache_folder(os.environ) / FOLDER_NAME
    if not (folder / "config.json").is_file():
        pytest.skip(f"the demo model is not in {folder}; make it with: make model")
    log = tmp_path_factory.mktemp("server") / "log"
    with running(log, folder, engine=makefile_flags("SERVE_FLAGS")) as server:
        yield server


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


class Figures(dict[str, float]):
    """Sums of the samples of ``/metrics``, by name and by name with one label."""

    @classmethod
    def of(cls, http: httpx.Client) -> Figures:
        figures = cls()
        for family in text_string_to_metric_families(http.get("/metrics").text):
            for name, labels, value, *_ in family.samples:
                for key in (name, *(f"{name}[{label}]" for label in labels.values())):
                    figures[key] = figures.get(key, 0.0) + value
        return figures

    def since(self, before: Figures) -> Callable[[str], float]:
        """Return how much a session figure has grown."""
        return lambda name: self.get(key := f"kvpolicy:session_{name}", 0.0) - before.get(key, 0.0)


def completion(http: httpx.Client, prompt: list[int], num_tokens: int) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    assert answer.json()["usage"]["completion_tokens"] == num_tokens


def chat(http: httpx.Client, text: str, num_tokens: int) -> None:
    message = {"role": "user", "content": text}
    body = {"model": MODEL, "messages": [message], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    assert answer.json()["usage"]["completion_tokens"] == num_tokens


def turn(number: int) -> str:
    return f"Hour {number}: inflow {100 + number % 90} litres per second, level steady. Is anything wrong?"


# -- the commands of the docs


def shapes(text: str) -> list[Any]:
    """Return what must be the same in two answers: the fields of objects, and other lines without their numbers.

    Lines of one shape in a row count as one, and empty ones not at all: a stream has as many pieces as it has.
    """
    with contextlib.suppress(json.JSONDecodeError):
        return [shape(json.loads(text))]
    found: list[Any] = []
    for line in filter(None, text.splitlines()):
        head, brace, rest = line.partition("{")
        try:
            # A page may leave fields of a long object out.
            value: Any = (head, shape(json.loads((brace + rest).replace(", ...}", "}"))))
        except json.JSONDecodeError:
            value = re.sub(r"\d+(\.\d+)?", "0", line)
        if found[-1:] != [value]:
            found.append(value)
    return found


def shape(value: Any) -> Any:
    match value:
        case dict():
            return {name: shape(item) for name, item in value.items()}
        case [first, *_]:
            return [shape(first)]
    return None


def fits(shown: Any, real: Any) -> bool:
    """Return whether an answer on a page could be a real one; only in a stream may it leave fields out."""
    if isinstance(shown, tuple) and isinstance(real, tuple):
        return shown[0] == real[0] and set(shown[1]) <= set(real[1])
    return bool(shown == real)


def run_in_a_shell(commands: list[Block], server: ServerProcess, folder: Path) -> list[str]:
    """Run blocks in one shell, as they stand but for the port; return what each prints."""
    mark = "--- the next block ---"
    script = f"echo '{mark}'\n".join(block.code for block in commands).replace(ADDRESS, f"127.0.0.1:{server.port}")
    environment = {**os.environ, "VLLM_API_KEY": "none"}
    done = subprocess.run(  # noqa: S603 - our own text
        ["/bin/bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split(mark + "\n")


@pytest.mark.parametrize("page", server_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run_as_written(
    page: Path, server: ServerProcess, http: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    Image.new("RGB", (64, 48), "navy").save(tmp_path / "frame.png")
    before = Figures.of(http)
    commands = [block for block in server_blocks(page) if block.language == "sh"]
    printed = run_in_a_shell(commands, server, tmp_path)
    for block, text in zip(commands, printed, strict=True):
        shown = answer_after(block)
        if shown is not None:
            expected, real = shapes(shown.code), shapes(text)
            assert len(expected) == len(real), (block.line, text)
            assert all(map(fits, expected, real)), (block.line, expected, real)
    assert Figures.of(http).since(before)("chunks_total") >= 1
    for block in server_blocks(page):
        if block.language == "python":
            code = block.code.replace(ADDRESS, f"127.0.0.1:{server.port}")
            exec(evolve(block, code=code).compiled(), {"__name__": "__main__"})  # noqa: S102 - our own text
            assert re.search(
                r"\n\d+ [34]\d\d \d+ 32 .*\n[^\n]+ tokens have left\n$", capsys.readouterr().out, re.DOTALL
            )
    # Pages leave sessions open; another page needs their places.
    for path in tmp_path.glob("session.json"):
        http.delete(f"{SESSIONS}/{json.loads(path.read_text())['session_id']}")


# -- one session, for long


@define
class Stretch:
    """Some turns in a row, each followed by an ordinary request of the same length with nothing cached."""

    ttft_s: list[float] = field(factory=list)
    reference_s: list[float] = field(factory=list)

    def add(self, http: httpx.Client, reply: FrameReply, rng: random.Random) -> None:
        started_s = time.perf_counter()
        completion(http, [rng.randrange(1000, 40000) for _ in range(reply.chunk_tokens)], 1)
        self.reference_s.append(time.perf_counter() - started_s)
        self.ttft_s.append(reply.ttft_s)

    def median_ratio(self) -> float:
        return statistics.median(self.ttft_s) / statistics.median(self.reference_s)

    def __str__(self) -> str:
        ttft, reference = statistics.median(self.ttft_s), statistics.median(self.reference_s)
        return f"{1000 * ttft:.0f} ms ({1000 * reference:.0f} ms an ordinary request)"


def test_300_turns_cost_the_same_at_the_end_as_at_the_beginning(server: ServerProcess, http: httpx.Client) -> None:
    rng = random.Random(5)
    early, late = Stretch(), Stretch()
    replies: list[FrameReply] = []
    memory_mib: list[float] = []
    before = Figures.of(http)
    started_s = time.perf_counter()
    with (
        SessionClient(server.url) as client,
        client.open(system_prompt=PROMPT, retention=RETENTION, sampling=SHORT) as session,
    ):
        max_blocks = session.opened.max_blocks
        for number in range(NUM_TURNS):
            replies.append(session.push(turn(number)))
            memory_mib.append(server.memory_mib())
            if number >= NUM_TURNS - NUM_MEASURED:
                late.add(http, replies[-1], rng)
            elif sum(reply.num_evicted_tokens for reply in replies) and len(early.ttft_s) < NUM_MEASURED:
                early.add(http, replies[-1], rng)
        status = session.status()
        during = Figures.of(http)
    took_s = time.perf_counter() - started_s
    after = Figures.of(http)

    num_evicted = sum(reply.num_evicted_tokens for reply in replies)
    full = [reply.blocks for reply in replies[NUM_TURNS // 3 :]]
    print(
        f"\n{NUM_TURNS} turns in {took_s:.0f} s, {NUM_TURNS / took_s:.1f} a second with {2 * NUM_MEASURED} ordinary "
        f"requests between them\ntime to first token, medians of {NUM_MEASURED} turns: {early} after the first "
        f"eviction, {late} at the end\nblocks {min(full)} to {max(full)} of at most {max_blocks}, resident tokens at "
        f"most {max(reply.resident_tokens for reply in replies)}, {status.num_evictions} evictions of {num_evicted} "
        f"tokens, {status.num_consolidations} consolidations\nmemory of the serving process "
        f"{memory_mib[NUM_TURNS // 3]:.0f} MiB after {NUM_TURNS // 3} turns, {memory_mib[-1]:.0f} at the end"
    )
    assert [reply.frame_index for reply in replies] == list(range(NUM_TURNS))
    assert status.num_evictions > NUM_TURNS / 2
    assert num_evicted == status.num_evicted_tokens > 8 * RETENTION["total_tokens"]
    assert max(reply.resident_tokens for reply in replies) <= RETENTION["total_tokens"]
    assert max(full) <= max_blocks
    assert max(full) - min(full) <= 2
    # A connection, a buffer or a task that stays with each turn would show; a few bytes would not.
    assert memory_mib[-1] - memory_mib[NUM_TURNS // 3] < 16
    assert len(early.ttft_s) == len(late.ttft_s) == NUM_MEASURED
    assert late.median_ratio() <= MAX_GROWTH * early.median_ratio()

    assert (during["kvpolicy:session_open[idle]"], after["kvpolicy:session_open[idle]"]) == (1, 0)
    assert during["kvpolicy:session_resident_blocks"] == replies[-1].blocks
    assert during["kvpolicy:session_resident_tokens"] == replies[-1].resident_tokens
    grown = after.since(before)
    assert grown("chunks_total") == grown("chunk_ttft_seconds_count") == NUM_TURNS
    assert grown("chunk_ttft_seconds_sum") == pytest.approx(sum(reply.ttft_s for reply in replies))
    assert grown("chunk_latency_seconds_sum") == pytest.approx(sum(reply.latency_s for reply in replies))
    assert grown("evictions_total") == status.num_evictions
    assert grown("evicted_tokens_total") == num_evicted
    assert grown("consolidations_total") == status.num_consolidations
    assert grown("closes_total[client]") == 1


# -- several sessions, and ordinary traffic


@define
class Traffic:
    """Ordinary requests, two at a time, for as long as the block lasts."""

    http: httpx.Client
    num: dict[str, int] = field(factory=lambda: {"completions": 0, "chat": 0})

    @contextlib.contextmanager
    def flowing(self) -> Iterator[None]:
        stop = threading.Event()
        with ThreadPoolExecutor() as threads:
            workers = [threads.submit(self._completions, stop), threads.submit(self._chats, stop)]
            try:
                yield
            finally:
                stop.set()
            for worker in workers:
                worker.result()

    def _completions(self, stop: threading.Event) -> None:
        rng = random.Random(7)
        while not stop.is_set():
            completion(self.http, [rng.randrange(1000, 40000) for _ in range(40)], 4)
            self.num["completions"] += 1

    def _chats(self, stop: threading.Event) -> None:
        while not stop.is_set():
            chat(self.http, f"What is {self.num['chat']} plus one?", 4)
            self.num["chat"] += 1


Held = tuple[list[FrameReply], SessionStatus]


def hold_in_threads(url: str) -> list[Held]:
    def hold(number: int) -> Held:
        with client.open(system_prompt=PROMPT, retention=RETENTION, sampling=SHORT) as session:
            replies = [session.push(turn(100 * number + index) * 2) for index in range(NUM_TURNS_EACH)]
            return replies, session.status()

    with SessionClient(url) as client, ThreadPoolExecutor(NUM_SESSIONS) as threads:
        return list(threads.map(hold, range(NUM_SESSIONS)))


def hold_in_tasks(url: str) -> list[Held]:
    async def hold(client: AsyncSessionClient, number: int) -> Held:
        async with await client.open(system_prompt=PROMPT, retention=RETENTION, sampling=SHORT) as session:
            replies = [await session.push(turn(100 * number + index) * 2) for index in range(NUM_TURNS_EACH)]
            return replies, await session.status()

    async def hold_all() -> list[Held]:
        async with AsyncSessionClient(url) as client:
            return await asyncio.gather(*(hold(client, number) for number in range(NUM_SESSIONS)))

    return asyncio.run(hold_all())


@pytest.mark.parametrize("hold", [hold_in_threads, hold_in_tasks])
def test_four_sessions_and_ordinary_traffic_go_on_beside_each_other(
    server: ServerProcess, http: httpx.Client, hold: Callable[[str], list[Held]]
) -> None:
    before = Figures.of(http)
    traffic = Traffic(http)
    started_s = time.perf_counter()
    with traffic.flowing():
        held = hold(server.url)
    took_s = time.perf_counter() - started_s

    num_turns = NUM_SESSIONS * NUM_TURNS_EACH
    ttft_s = statistics.median(reply.ttft_s for replies, _ in held for reply in replies)
    print(
        f"\n{NUM_SESSIONS} sessions beside ordinary requests for {took_s:.0f} s: {num_turns / took_s:.1f} turns a "
        f"second (median time to first token {1000 * ttft_s:.0f} ms), "
        + ", ".join(f"{num / took_s:.1f} {name} a second" for name, num in traffic.num.items())
    )
    assert len({status.session_id for _, status in held}) == NUM_SESSIONS
    for replies, status in held:
        assert [reply.frame_index for reply in replies] == list(range(NUM_TURNS_EACH))
        assert status.frames == NUM_TURNS_EACH
        assert status.refused == 0
        assert max(reply.blocks for reply in replies) <= status.max_blocks
        assert sum(reply.num_evicted_tokens for reply in replies) == status.num_evicted_tokens > 0
    assert min(traffic.num.values()) >= NUM_TURNS_EACH / 4
    grown = Figures.of(http).since(before)
    assert grown("chunks_total") == num_turns
    assert grown("closes_total[client]") == grown("closes_total") == NUM_SESSIONS


# -- what goes wrong


def opened(http: httpx.Client, num_tokens: int) -> str:
    sampling = {**SHORT, "max_tokens": num_tokens, "ignore_eos": True}
    answer = http.post(SESSIONS, json={"system_prompt": PROMPT, "sampling": sampling})
    assert answer.status_code == httpx.codes.CREATED, answer.text
    return str(answer.json()["session_id"])


def test_a_client_that_leaves_in_mid_reply_takes_its_session_with_it(http: httpx.Client) -> None:
    before = Figures.of(http)
    session = opened(http, 300)
    with http.stream("POST", f"{SESSIONS}/{session}/frame?stream=true", json={"text": turn(0)}) as answer:
        assert answer.status_code == httpx.codes.OK
        # Kept: a generator that nobody has closes the connection at once.
        lines = answer.iter_lines()
        assert next(lines).startswith('data: {"text":')
        assert Figures.of(http)["kvpolicy:session_open[pending]"] == 1
    deadline_s = time.monotonic() + 60
    while (status := http.get(f"{SESSIONS}/{session}").json())["state"] != "ended":
        assert time.monotonic() < deadline_s, status
        time.sleep(0.02)
    assert "disconnected" in status["reason"]
    late = http.post(f"{SESSIONS}/{session}/frame", json={"text": turn(1)})
    assert (late.status_code, late.json()["error"]["code"]) == (409, "ended_disconnect")
    while Figures.of(http)["kvpolicy:session_open"]:
        assert time.monotonic() < deadline_s, "the engine does not let go of it"
        time.sleep(0.02)
    # The engine shows what it uses as of its last step, so it has to take one.
    completion(http, [5] * 20, 2)
    after = Figures.of(http)
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert after["kvpolicy:session_open"] == after["kvpolicy:session_resident_blocks"] == 0
    assert after.since(before)("closes_total[disconnect]") == 1
    assert after.since(before)("chunks_total") == 0


def test_a_body_that_is_cut_half_way_pushes_nothing(server: ServerProcess, http: httpx.Client) -> None:
    session = opened(http, 2)
    body = json.dumps({"text": turn(0)}).encode()
    head = f"POST {SESSIONS}/{session}/frame HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) // 2])
    time.sleep(0.3)
    status = http.get(f"{SESSIONS}/{session}").json()
    assert (status["state"], status["frames"], status["refused"]) == ("idle", 0, 0)
    answer = http.post(
        f"{SESSIONS}/{session}/frame?frame_index=0", content=body, headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["frame_index"]) == (200, 0)
    assert http.delete(f"{SESSIONS}/{session}").json()["closed"] is True


def test_a_chunk_that_does_not_fit_is_counted_and_the_session_goes_on(
    server: ServerProcess, http: httpx.Client
) -> None:
    before = Figures.of(http)
    with SessionClient(server.url) as client, client.open(retention=RETENTION, sampling=SHORT) as session:
        session.push(turn(0))
        with pytest.raises(ChunkRefusedError) as caught:
            session.push("pump " * 600)
        assert caught.value.code == "chunk_too_long"
        assert session.push(turn(1)).frame_index == 1
        assert session.status().refused == 1
    grown = Figures.of(http).since(before)
    assert (grown("refused_chunks_total[chunk_too_long]"), grown("chunks_total")) == (1, 2)


def test_the_console_in_a_browser(server: ServerProcess) -> None:
    """On the real engine what ``test_console`` does on the stand-in; how it looks is kept for people to judge."""
    pytest.importorskip("selenium", reason="selenium is not installed: see requirements/browser.txt")
    from tests.integration.browser import chromium, drive_console

    with chromium() as browser:
        drive_console(browser, server.url, ROOT / "build" / "screenshots" / "console-real.png")

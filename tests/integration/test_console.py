"""The session console in a real browser, over the stand-in engine: what is shown is what the engine has said."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from kvpolicy.core.errors import ChunkRefusedError, SessionFailedError
from kvpolicy.core.replies import SegmentView
from tests.fakes.session_engine import FakeEngine, FakeSession
from tests.unit.http.serving import image_bytes, loopback

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fastapi import FastAPI

    from kvpolicy.core.replies import Reply

pytest.importorskip("selenium", reason="selenium is not installed: see requirements/browser.txt")
from selenium.webdriver.common.keys import Keys

from tests.integration.browser import Console, chromium, drive_console

# Kept: how the page looks is for people to judge.
SHOTS = Path(__file__).parents[2] / "build" / "screenshots"


class _WindowedSession(FakeSession):
    """A session that also forgets by chunks, and tells anchor, chunks and replies apart."""

    def _count(self, text: str, num_tokens: int) -> Reply:
        reply = super()._count(text, num_tokens)
        budget: Mapping[str, Any] = self.retention or {}
        old = list(self._kept)
        kind = "content" if old else "anchor"
        new = [*old, SegmentView(kind, num_tokens), SegmentView("reply", num_tokens)]
        evicted = 0
        while (
            sum(part.kind == "content" for part in new) > budget["content_segments"]
            or _size(new) > budget["total_tokens"]
        ):
            evicted += new.pop(1).num_tokens
        self._kept = tuple(new)
        self._stats = evolve(
            self._stats,
            segments=self._kept,
            resident_tokens=_size(new),
            num_blocks=-(-_size(new) // 16),
            num_consolidations=self._stats.num_chunks // 9,
            num_evictions=self._num_evictions + (evicted > 0),
            num_evicted_tokens=self._num_evicted + evicted,
        )
        self._num_evictions, self._num_evicted = self._stats.num_evictions, self._stats.num_evicted_tokens
        return evolve(
            reply,
            num_evicted_tokens=evicted,
            resident_tokens=_size(new),
            num_blocks=self._stats.num_blocks,
            ttft_s=0.02 + 0.001 * (reply.chunk * 7 % 5),
            total_s=0.3,
            consolidated=reply.chunk % 9 == 8,
        )

    _kept: tuple[SegmentView, ...] = ()
    _num_evictions = 0
    _num_evicted = 0


class WindowedEngine(FakeEngine):
    """The stand-in engine with such sessions."""

    session_class = _WindowedSession


def _size(segments: list[SegmentView]) -> int:
    return sum(segment.num_tokens for segment in segments)


def happen(event: asyncio.Event) -> None:
    """Set an event for which something waits in the server's loop."""
    event._loop.call_soon_threadsafe(event.set)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def test_a_session_from_its_opening_to_its_end(browser: Any) -> None:
    engine = WindowedEngine()
    refused = ChunkRefusedError("chunk_too_long", "chunk: expected at most 1024 tokens, got 30000; send less")
    engine.script.extend([None, None, None, refused])
    with loopback(engine) as url:
        drive_console(browser, url, SHOTS / "console.png")
    assert engine.live == set()


def test_playing_shows_an_eviction(browser: Any) -> None:
    engine = WindowedEngine()
    first = engine.hold_pushes = asyncio.Event()
    with loopback(engine) as url:
        console = Console(browser, url)
        console.fill(content_segments=2)
        console.find("#play").click()
        console.wait(lambda: engine.waiting)
        # Only the second turn is held back now, so that the first can be looked at for as long as it takes.
        second = engine.hold_pushes = asyncio.Event()
        happen(first)
        console.wait(lambda: len(console.texts(".turn")) == 2 and engine.waiting)
        assert len(console.texts(".turn[data-index]")) == 1
        assert console.gone() == 0
        engine.hold_pushes = None
        happen(second)
        console.wait(lambda: len(console.texts(".turn[data-index]")) >= 6)
        console.find("#play").click()
        console.wait_state("open")
        assert console.gone() > 0
        kinds = [kind for kind, _ in console.bar()]
        assert kinds[:2] == ["anchor", "content"] or kinds[:2] == ["anchor", "reply"]
        assert kinds.count("content") == 2
        assert int(console.find("#tokens-gone").text) > 0
        assert "gone" in console.find("#bar").get_attribute("aria-label")
        assert console.find("#plot-resident .evicted-mark")
        assert console.find("#play").text.startswith("Play")
        assert console.faults() == []


def test_pieces_appear_while_the_reply_is_made(browser: Any) -> None:
    engine = WindowedEngine()
    engine.pieces_before_hold = 1
    engine.hold_pushes = asyncio.Event()
    with loopback(engine) as url:
        console = Console(browser, url)
        console.open()
        console.find("#text").send_keys("one two", Keys.ENTER)
        console.wait(lambda: console.texts(".turn .reply") == ["one "])
        assert console.find("#state").text == "pending"
        assert not console.find("#send").is_enabled()
        console.find("#close").click()
        console.wait_state("ended")
        assert any("closed" in reason for reason in console.errors())


def test_a_dead_session_says_why_and_offers_a_new_one(browser: Any) -> None:
    engine = WindowedEngine()
    engine.errors_end_sessions = True
    engine.script.extend([None, SessionFailedError("engine", "the engine ended the session (abort)")])
    with loopback(engine) as url:
        console = Console(browser, url)
        console.open()
        console.send("one two three")
        console.send("four five six")
        console.wait_state("ended")
        assert any("the engine ended the session (abort)" in reason for reason in console.texts(".ended li"))
        assert not console.find("#send").is_enabled()
        console.find(".ended button").click()
        console.wait_state("open")
        console.send("seven")
        assert console.texts(".turn[data-index] .reply") == ["seven "]


def test_text_is_shown_never_interpreted(browser: Any) -> None:
    nasty = "<img src=x onerror=alert(1)><script>document.title='x'</script>"
    with loopback(WindowedEngine()) as url:
        console = Console(browser, url)
        console.open()
        console.send(nasty)
        assert console.texts(".turn .reply")[0].split() == nasty.split()
        assert console.texts(".turn .chunk") == [nasty]
        assert console.texts("#log img, #log script") == []
        assert "kvpolicy" in browser.title
        assert console.faults() == []


def test_an_image_goes_with_its_text(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "frame.png").write_bytes(image_bytes(20, 10))
    engine = WindowedEngine()
    with loopback(engine) as url:
        console = Console(browser, url)
        console.open()
        console.find("#image").send_keys(str(tmp_path / "frame.png"))
        console.wait(lambda: console.find("#thumb").is_displayed())
        console.send("what is this")
        assert console.texts(".turn[data-index] .reply") == ["20x10 what is this "]
        assert console.find(".turn img").get_attribute("alt") == "frame.png"
        assert not console.find("#thumb").is_displayed()
        assert console.faults() == []


def test_with_a_key_the_page_can_be_loaded_and_the_sessions_stay_guarded(browser: Any) -> None:
    from vllm.entrypoints.serve.utils.server_utils import AuthenticationMiddleware

    def guard(app: FastAPI) -> None:
        app.add_middleware(AuthenticationMiddleware, tokens=["secret"])

    engine = WindowedEngine()
    with loopback(engine, prepare=guard) as url:
        guarded = Console(browser, url)
        assert guarded.find("body").text == '{"error":"Unauthorized"}'
        console = Console(browser, url, path="/streaming/console")
        console.wait(lambda: "wants an API key" in console.find("#server").text)
        console.find("#open").click()
        console.wait(console.errors)
        assert "API key" in console.errors()[0]
        assert engine.opened == []
        console.open(key="secret")
        console.send("one two")
        assert console.texts(".turn[data-index] .reply") == ["one two "]


def test_leaving_the_page_closes_its_session(browser: Any) -> None:
    engine = WindowedEngine()
    with loopback(engine) as url:
        console = Console(browser, url)
        console.open()
        assert len(engine.live) == 1
        browser.get("about:blank")
        console.wait(lambda: not engine.live)

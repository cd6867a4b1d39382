"""A headless Chromium for tests, and what a person does with the session console."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_PATIENCE_S = 60.0
# Faults of the page: of its scripts, or stopped by its Content-Security-Policy. Refused requests are none.
_FAULTS = {"javascript", "security", "other", "violation"}


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser of its own for a test; skip the test where none is installed."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no browser: needs chromium and chromedriver (Debian: scripts/install_browser.sh)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    # The sandbox needs privileges that containers lack; the pages are our own.
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1440,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield browser
    finally:
        browser.quit()


class Console:
    """The console page in a browser, by what can be seen and done on it."""

    def __init__(self, browser: Any, url: str, *, path: str = "/v1/streaming/console") -> None:
        """Load the page of the server at ``url``."""
        self.browser = browser
        browser.get(f"{url}{path}")

    def find(self, selector: str) -> Any:
        """Return the element of a selector."""
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements of a selector."""
        script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)"
        return [str(text) for text in self.browser.execute_script(script, selector)]

    def wait(self, holds: Callable[[], object]) -> None:
        """Wait until something can be seen."""
        WebDriverWait(self.browser, _PATIENCE_S, poll_frequency=0.05).until(lambda _: holds())

    def wait_state(self, state: str) -> None:
        """Wait for the word at the top right."""
        self.wait(lambda: self.find("#state").text == state)

    def fill(self, **fields: object) -> None:
        """Write into fields by their ids."""
        for name, value in fields.items():
            field = self.find(f"#{name}")
            field.clear()
            field.send_keys(str(value))

    def open(self, **fields: object) -> None:
        """Open a session."""
        self.fill(**fields)
        self.find("#open").click()
        self.wait_state("open")

    def send(self, text: str) -> None:
        """Send a chunk with the keyboard; wait until it is answered or refused."""
        box = self.find("#text")
        self.browser.execute_script("arguments[0].value = arguments[1]", box, text)  # long texts are slow to type
        num_turns = len(self.texts(".turn"))
        box.send_keys(Keys.ENTER)
        self.wait(lambda: len(self.texts(".turn")) == num_turns + 1 and self.find("#state").text != "pending")

    def bar(self) -> list[tuple[str, str]]:
        """Return the kinds and the widths of the bar's segments."""
        # In one go, here and below: the page may draw anew between finding a part and reading it.
        script = (
            "return [...document.querySelectorAll('#bar [data-kind]')]"
            ".map((part) => [part.dataset.kind, part.getAttribute('width')])"
        )
        return [(str(kind), str(width)) for kind, width in self.browser.execute_script(script)]

    def gone(self) -> float:
        """Return the share of the stream that is shown as gone, in percent."""
        script = "return document.querySelector('#bar-gone').getAttribute('width')"
        return float(str(self.browser.execute_script(script)).rstrip("%"))

    def curve(self, plot: str) -> str:
        """Return the line of a plot."""
        return str(self.find(f"#{plot} path").get_attribute("d"))

    def errors(self) -> list[str]:
        """Return all reasons of all errors on the page."""
        return self.texts(".error li")

    def faults(self) -> list[Any]:
        """Return what the browser holds against the page."""
        return [entry for entry in self.browser.get_log("browser") if entry["source"] in _FAULTS]


def drive_console(browser: Any, url: str, screenshot: Path) -> None:
    """Go through a session on the console of any server: open, three turns, a refused one, close.

    The server's engine refuses chunks of 60 000 tokens and takes short ones.
    """
    console = Console(browser, url)
    console.wait(lambda: "blocks of" in console.find("#server").text)

    console.fill(total_tokens=10, content_segments=0)
    console.find("#open").click()
    console.wait(lambda: len(console.errors()) == 2)
    told = " ".join(console.errors())
    assert "total_tokens" in told
    assert "content_segments" in told

    console.open(total_tokens=1024, content_segments=2, max_tokens=16)
    assert console.errors() == []
    seen = []
    for turn in range(3):
        console.send(f"Entry {turn}: the ferry is late, and thirty passengers wait on the pontoon. What is late?")
        replies = console.texts(".turn[data-index] .reply")
        assert len(replies) == turn + 1
        assert replies[-1].strip()
        figures = console.texts(".turn:last-of-type .figures span")
        assert any(figure.startswith("TTFT ") and figure.endswith(" ms") for figure in figures)
        assert {f"turn {turn + 1}", "evicted", "resident"} <= {*figures, *(figure.split()[0] for figure in figures)}
        seen.append((console.bar(), console.curve("plot-resident"), console.curve("plot-ttft")))
        assert console.bar()[0][0] == "anchor"
    for drawn in zip(*seen, strict=True):
        assert len({str(drawing) for drawing in drawn}) == 3, "the bar and the plots follow every turn"

    console.send("word," * 30_000)
    assert len(console.errors()) >= 1
    assert all(console.errors())
    assert "no reply" in console.texts(".turn:last-of-type .figures")
    assert len(console.texts(".turn[data-index]")) == 3
    console.wait(lambda: console.find("#refused").text == "1")
    console.wait_state("open")

    screenshot.parent.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(screenshot))
    console.find("#close").click()
    console.wait_state("ended")
    assert "Closed after 3 turns" in " ".join(console.texts(".note"))
    assert console.find("#open").is_enabled()
    assert console.faults() == []

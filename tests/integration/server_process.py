"""A real server process on a loopback port: started, watched and ended as its user would."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import httpx
import psutil
from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Nothing takes this long; it ends what hangs, also on a machine that is slow or stands still for a while.
_START_S, _END_S, _POLL_S = 300, 120, 0.1
# For random weights and short contexts.
TINY_ENGINE = (
    "--dtype float32 --max-model-len 512 --max-num-batched-tokens 512 --block-size 16 --max-num-seqs 8 "
    f"--num-gpu-blocks-override 200 --kv-cache-memory-bytes {1 << 28} --enforce-eager"
)
COMMAND = (sys.executable, "-c", "import kvpolicy.cli; kvpolicy.cli.main()")


@define
class ServerProcess:
    """One ``kvpolicy serve`` process and its log."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    _seen: set[psutil.Process] = field(factory=set)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def children(self) -> list[psutil.Process]:
        """Return the processes under it, the engine's among them."""
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        self._seen.update(children)
        return children

    def memory_mib(self) -> float:
        """Return the resident memory of the process that serves, without that of its engines."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / (1 << 20)

    def engines(self) -> list[psutil.Process]:
        """Return the processes of engine cores: none before the server has come so far."""
        found = []
        for child in self.children():
            # Some live for a moment only.
            with contextlib.suppress(psutil.Error):
                if "EngineCore" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop the engine meanwhile: what the server asks of it stays unanswered, however slow a test is."""
        engines = self.engines()
        assert engines, "no engine: " + self.text()
        for engine in engines:
            engine.suspend()
        try:
            yield
        finally:
            for engine in engines:
                # A test may have ended it.
                with contextlib.suppress(psutil.NoSuchProcess):
                    engine.resume()

    def wait_until_up(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == httpx.codes.OK:
                    self.children()
                    return
            time.sleep(_POLL_S)
        raise AssertionError("the server did not come up:\n" + self.text())

    def wait_until_gone(self) -> int:
        """Wait for its end; return the exit status. Neither the process nor any under it is left then."""
        status = self.process.wait(_END_S)
        _, alive = psutil.wait_procs(self._seen, timeout=_END_S)
        assert not alive, f"left behind: {alive}\n{self.text()}"
        return status

    def text(self) -> str:
        """Return what it has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """End it and everything under it, however it is."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.children()
        self.process.kill()
        self.process.wait()
        for child in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a loopback port at which nobody listens, kept for whoever binds it by its number.

    The socket that keeps it is bound and does not listen. So the port is given to nobody else, neither to a server that
    takes any nor to a client's end of a connection; connections to it are refused; and a server, which sets
    SO_REUSEADDR as this one does, can bind it.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]


@contextlib.contextmanager
def running(log: Path, model: Path, *flags: str, engine: str = TINY_ENGINE) -> Iterator[ServerProcess]:
    """Yield a server that answers; end it afterwards if it still runs."""
    with starting(log, model, *flags, engine=engine) as server:
        server.wait_until_up()
        yield server


@contextlib.contextmanager
def starting(log: Path, model: Path, *flags: str, engine: str = TINY_ENGINE) -> Iterator[ServerProcess]:
    """Yield such a server as soon as there is a process."""
    with reserved_port() as port:
        command = [*COMMAND, "serve", str(model), *engine.split(), "--host", "127.0.0.1", "--port", str(port), *flags]
        with log.open("wb") as file:
            process = subprocess.Popen(  # noqa: S603 - ours
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
            )
        server = ServerProcess(process, port, log)
        try:
            yield server
        finally:
            if process.poll() is None:
                server.kill()

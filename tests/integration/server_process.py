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

_START_S, _END_S, _POLL_S = 120, 40, 0.1
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

    def engines(self) -> list[psutil.Process]:
        """Return the processes of engine cores: none before the server has come so far."""
        found = []
        for child in self.children():
            # Some live for a moment only.
            with contextlib.suppress(psutil.Error):
                if "EngineCore" in " ".join(child.cmdline()):
                    found.append(child)
        return found

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
        _, alive = psutil.wait_procs(self._seen, timeout=10)
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
def running(log: Path, model: Path, *flags: str, engine: str = TINY_ENGINE) -> Iterator[ServerProcess]:
    """Yield a server that answers; end it afterwards if it still runs."""
    with starting(log, model, *flags, engine=engine) as server:
        server.wait_until_up()
        yield server


@contextlib.contextmanager
def starting(log: Path, model: Path, *flags: str, engine: str = TINY_ENGINE) -> Iterator[ServerProcess]:
    """Yield such a server as soon as there is a process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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

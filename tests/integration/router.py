"""nginx as the how-to configures it: on loopback ports, in a folder of its own, with no privilege."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.integration.server_process import reserved_port
from tests.pages import DOCS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

CONFIGURATION = DOCS / "howto" / "nginx-sessions.conf"
_PATIENCE_S = 60
_WHOLE = """
daemon off;
worker_processes 2;
pid {folder}/pid;
{user}
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/sessions.conf;
}}
"""


def require_nginx() -> str:
    """Return the command; without it the test is skipped."""
    command = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if command is None:
        pytest.skip("nginx is not installed (Debian: apt-get install nginx-light)")
    return command


def configured(router: int, servers: Sequence[int]) -> str:
    """Return the how-to's configuration with other ports, and with as many servers as there are."""
    lines = []
    for line in CONFIGURATION.read_text(encoding="utf-8").splitlines():
        if "127.0.0.1:8001" in line:
            lines += [line.replace("8001", str(port)) for port in servers]
        elif "127.0.0.1:8002" not in line:
            lines.append(line.replace("127.0.0.1:8080", f"127.0.0.1:{router}"))
    return "\n".join(lines)


@contextlib.contextmanager
def routing(folder: Path, servers: Sequence[int]) -> Iterator[str]:
    """Yield the address of a router in front of these ports; end it afterwards."""
    command = require_nginx()
    folder.mkdir()
    with reserved_port() as port:
        yield from _routing(command, port, folder, servers)


def _routing(command: str, port: int, folder: Path, servers: Sequence[int]) -> Iterator[str]:
    (folder / "sessions.conf").write_text(configured(port, servers), encoding="utf-8")
    # A root's workers would be somebody else, who cannot come into the folder.
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(_WHOLE.format(folder=folder, user=user), encoding="utf-8")
    log = folder / "log"
    process = subprocess.Popen([command, "-p", str(folder), "-e", str(log), "-c", str(folder / "nginx.conf")])  # noqa: S603
    try:
        _wait_until_up(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)


def _wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError("nginx did not come up: " + log.read_text(encoding="utf-8"))

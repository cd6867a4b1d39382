"""A child's side of its pipes: messages out as JSON lines, and an end when the parent is gone."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Send = Callable[..., None]

_PARENT_POLL_S = 0.5


def end_with(parent: int) -> None:
    """End this process group, engine processes included, when the parent is gone however it went."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def take_over_stdout() -> Send:
    """Return the function that sends a message; from now on, printing goes to the log."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(message: str, **fields: Any) -> None:  # noqa: ANN401 - JSON values
        channel.write(json.dumps({"message": message, **fields}) + "\n")
        channel.flush()

    return send


def describe(error: BaseException) -> str:
    """Return one line on an error: the message of some is a page of advice, and its first line says what happened."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}".rstrip(": ")


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)

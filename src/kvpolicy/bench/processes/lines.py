"""A parent's side of a child's pipe: the lines that the child writes, taken by a thread as they come."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

from attrs import define, field

if TYPE_CHECKING:
    import subprocess

_POLL_S = 0.2
# How long a child that has ended is listened to, where somebody it has started still holds its pipe.
_LAST_WORDS_S = 5.0


@define
class ChildLines:
    """What a child writes to its standard output, a pipe in text mode."""

    process: subprocess.Popen[str]
    _lines: queue.Queue[str] = field(factory=queue.Queue, init=False)
    _reader: threading.Thread = field(init=False)
    _ended_s: float | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        """Begin to read."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def next(self) -> str | None:
        """Return the next line, or None if there is none for a moment.

        Raises:
            EOFError: the child has ended, and all that it wrote has been returned.
        """
        is_over = self._is_over()
        try:
            return self._lines.get(timeout=_POLL_S)
        except queue.Empty:
            if is_over:
                raise EOFError from None
            return None

    def join(self, patience_s: float) -> None:
        """Wait until everything has been read."""
        self._reader.join(patience_s)

    def _is_over(self) -> bool:
        """Whether no further line can come. That the child has ended is not enough: its last ones may be unread."""
        if self.process.poll() is None:
            return False
        if self._ended_s is None:
            self._ended_s = time.monotonic()
        return not self._reader.is_alive() or time.monotonic() - self._ended_s > _LAST_WORDS_S

    def _read(self) -> None:
        """Take lines until nobody can write any more."""
        assert self.process.stdout is not None  # noqa: S101 - a pipe was asked for
        with self.process.stdout as stdout:
            for line in stdout:
                self._lines.put(line)

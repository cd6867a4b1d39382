"""How a line of kvpolicy's logs is made. Each adapter has a logger, and events, of its own."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def make_logger(name: str, *processors: Any, first: tuple[str, ...] = ("event",)) -> Any:
    """Return the standard logger of this name in structlog's style; its level decides what is written.

    Lines are for people where standard error is a terminal, JSON objects elsewhere.

    Args:
        name: of the logger.
        processors: what adds to an event before it becomes a line.
        first: the keys that a line for people begins with.
    """
    renderer: Any = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.processors.KeyValueRenderer(key_order=first)
    return structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, *processors, structlog.processors.format_exc_info, renderer],
        wrapper_class=structlog.stdlib.BoundLogger,
    )

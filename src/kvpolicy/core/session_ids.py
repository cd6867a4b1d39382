"""What may be shown of a session's id in logs and errors: whoever knows the whole of it can use the session."""

from __future__ import annotations

import re

_NUM_SHOWN = 8
_ID = re.compile(r"(?<=/v1/streaming/sessions/)[\w-]+")


def shown_id(session_id: str) -> str:
    """Return what may be shown of an id.

    >>> shown_id("0rAV1dKGMgSzQkWfCq1LJQsK6nW9xBbE")
    '0rAV1dKG'
    """
    return session_id[:_NUM_SHOWN]


def without_ids(text: str) -> str:
    """Return a text with the ids in paths of the session routes cut to what may be shown.

    >>> without_ids("GET /v1/streaming/sessions/0rAV1dKGMgSzQkWfCq1LJQsK6nW9xBbE HTTP/1.1")
    'GET /v1/streaming/sessions/0rAV1dKG... HTTP/1.1'
    """
    return _ID.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    shown = shown_id(found[0])
    return shown if shown == found[0] else f"{shown}..."

"""What the log of an engine says about its end."""

from __future__ import annotations

import re

# "ValueError: could not ..." at the end of a traceback, behind the prefix that vLLM puts before each line.
_ERROR_LINE = re.compile(r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): (.+)$")
# What a dying engine makes its client say: it tells that the engine died, not why.
_CONSEQUENCES = ("EngineDeadError", "EngineGenerateError")


def find_reason(log: str) -> str:
    r"""Return the first error that an engine's log names, without those that only follow from it; "" if none.

    >>> find_reason("(EngineCore pid=7) ERROR 08-01 core.py:9] ValueError: could not broadcast\n")
    'ValueError: could not broadcast'
    """
    for line in log.splitlines():
        match = _ERROR_LINE.search(line.rstrip())
        if match and match[1].rpartition(".")[2] not in _CONSEQUENCES:
            return f"{match[1]}: {match[2].strip()}"
    return ""

"""Writes the synchronous HTTP client from the asynchronous one, which is the one to change.

``python scripts/make_sync_client.py`` writes it; with ``--check`` nothing is written, and the exit status is 1 if it is
not what would be written. ``make client`` and ``make lint`` do these.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "src" / "kvpolicy" / "client"
SOURCE, TARGET = FOLDER / "asynchronous.py", FOLDER / "synchronous.py"

# In this order, and whole words only.
REPLACEMENTS = {
    "The asynchronous client": f"The synchronous client: change the other one, then {Path(__file__).name} writes it",
    "an asynchronous context manager": "a context manager",
    "one after the other or at once": "one after the other or in threads",
    "(async|await) ": "",
    "__a(enter|exit)__": r"__\1__",
    "asynccontextmanager": "contextmanager",
    "a(closing|close|read)": r"\1",
    "aiter_lines": "iter_lines",
    "Async(BaseTransport|Client|Generator|Iterator|Session|SessionClient)": r"\1",
}


def synchronous(source: str) -> str:
    """Return the synchronous form of a module, formatted."""
    for pattern, text in REPLACEMENTS.items():
        source = re.sub(rf"\b{pattern}\b", text, source)
    if left := re.search(r"a?sync[a-z]*|await", source.partition('"""\n')[2], re.IGNORECASE):
        sys.exit(f"{SOURCE.name}: {left[0]!r} has no synchronous form in {Path(__file__).name}")
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout  # noqa: S603 - ours


def main() -> None:
    """Write or check."""
    text = synchronous(SOURCE.read_text(encoding="utf-8"))
    if sys.argv[1:] != ["--check"]:
        TARGET.write_text(text, encoding="utf-8")
    elif text != TARGET.read_text(encoding="utf-8"):
        sys.exit(f"{TARGET.name} is not what {SOURCE.name} gives: change that one, then 'make client'")


if __name__ == "__main__":
    main()

"""How the reasons why a process of an engine refuses to start reach whoever starts the engine.

vLLM's processes tell each other that they have failed, and not why: the caller reads "See root cause above". The
workers alone have the model, and the exception of one passes through two processes that drop it. So the reasons are
written to a file, which whoever starts the engine has made. Its name follows from the one secret that a process and all
its descendants have in common however they are started, multiprocessing's authentication key: nothing has to travel in
the environment, or in ``additional_config``, which is part of the key of vLLM's cache of compiled code.

Where no such file is (workers on another machine, an engine that vLLM's own classes start), the reasons are in the log.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def refuse(reasons: Iterable[str]) -> NoReturn:
    """Refuse to start, in any process of the engine.

    Raises:
        PolicyUsageError: with these reasons.
    """
    error = PolicyUsageError(reasons)
    try:
        # Not made here: where nobody has made it, nobody would remove it.
        file = os.open(notes_path(), os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        raise error from None
    with os.fdopen(file, "a") as notes:
        notes.write(json.dumps(error.reasons) + "\n")
    raise error


@contextmanager
def reasons_of_processes() -> Iterator[None]:
    """Start an engine inside this: it fails with the reasons of its processes, if they have given any.

    Engines that threads of one process start at the same moment share the file.

    Raises:
        PolicyUsageError: every reason, once.
    """
    path = notes_path()
    os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600))
    try:
        yield
    except Exception as error:
        reasons = [reason for line in path.read_text().splitlines() for reason in json.loads(line)]
        if reasons:
            raise PolicyUsageError(dict.fromkeys(reasons)) from error
        raise
    finally:
        path.unlink(missing_ok=True)


def notes_path() -> Path:
    """Return the file of this process and all its descendants."""
    key = blake2b(multiprocessing.current_process().authkey, digest_size=16, person=b"kvpolicy").hexdigest()
    return Path(tempfile.gettempdir()) / f"kvpolicy-{key}"

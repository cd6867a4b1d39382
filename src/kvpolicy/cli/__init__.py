"""The ``kvpolicy`` command: the composition root, where adapters are built and handed to the core."""

from __future__ import annotations

import sys

from kvpolicy.core.errors import KVPolicyError, MissingExtraError


def main() -> None:
    """Run the ``kvpolicy`` command and exit.

    Nothing is imported before this is called, so that a missing extra is one line that names it and not a
    traceback.
    """
    try:
        from kvpolicy.cli.app import app
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if not module or module == "kvpolicy":
            raise
        sys.exit(f"kvpolicy: {MissingExtraError(extra='cli', module=module)}")
    try:
        app()
    except KVPolicyError as error:
        sys.exit(f"kvpolicy: {error}")

"""``kvpolicy serve``: help without vLLM, and user errors as lines instead of tracebacks."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.serving import SERVE_FLAGS, serve

if TYPE_CHECKING:
    from collections.abc import Sequence

USER_ERROR = 2

_DESCRIPTION = """\
vLLM's OpenAI-compatible server, with policies for the KV cache and with bounded streaming sessions. Without
any of the flags below it is what 'vllm serve' starts."""

_EPILOG = """\
Every flag of 'vllm serve' is taken as well: kvpolicy serve --help=all lists them, --help=Frontend those of one
group (both start vLLM, which takes some seconds).

Sessions need one API server and no pipeline parallelism; async scheduling is turned off.

  kvpolicy serve Qwen/Qwen3-4B --enable-streaming
  kvpolicy serve Qwen/Qwen3-4B --kv-cache-policy randkv --max-model-len 32768"""


def run_serve(arguments: Sequence[str]) -> int:
    """Serve until told to stop; return the exit status: 2 after an error of the user, with every reason."""
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(_help())
        return 0
    try:
        return serve(arguments)
    except PolicyUsageError as error:
        for reason in error.reasons:
            sys.stderr.write(f"kvpolicy serve: {reason}\n")
        return USER_ERROR


def _help() -> str:
    parser = argparse.ArgumentParser(
        prog="kvpolicy serve",
        usage="kvpolicy serve MODEL [any flag of 'vllm serve'] [flags of kvpolicy]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    SERVE_FLAGS.add_to(parser)
    return parser.format_help()

"""Version dispatch: ``LLM`` and ``AsyncLLM`` (and what it returns) for the vLLM that is installed.

Importing this module imports neither vLLM nor torch; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvpolicy.core.errors import MissingExtraError, UnsupportedEngineError
from kvpolicy.core.replies import Reply, SessionStats

if TYPE_CHECKING:
    from kvpolicy.adapters.vllm.shared.session import Session as Session
    from kvpolicy.adapters.vllm.v0_28.frontend.async_llm import AsyncLLM as AsyncLLM
    from kvpolicy.adapters.vllm.v0_28.frontend.chat import ChatFormat as ChatFormat
    from kvpolicy.adapters.vllm.v0_28.frontend.llm import LLM as LLM

__all__ = ["LLM", "AsyncLLM", "ChatFormat", "Reply", "Session", "SessionStats", "adapter_package"]

# Release (first two numbers) -> the package written and tested for it.
_ADAPTERS = {"0.28": "kvpolicy.adapters.vllm.v0_28"}

_HOME = {"AsyncLLM": "frontend.async_llm", "ChatFormat": "frontend.chat", "LLM": "frontend.llm"}
# The same for every version; it imports vLLM, and so waits for its first use.
_SHARED = {"Session": "kvpolicy.adapters.vllm.shared.session"}


def adapter_package(version: str | None = None) -> str:
    """Return the dotted name of the adapter package for a vLLM version (default: the installed one).

    The version is ``vllm.__version__``, never package metadata: the CPU build is published under another name.

    Raises:
        MissingExtraError: vLLM is not installed.
        UnsupportedEngineError: no adapter was written for that version.
    """
    if version is None:
        try:
            version = str(importlib.import_module("vllm").__version__)
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            raise MissingExtraError(extra="vllm", module="vllm") from error
    release = ".".join(version.split(".")[:2])
    if release not in _ADAPTERS:
        known = ", ".join(f"{name}.x" for name in sorted(_ADAPTERS))
        message = f"vllm.__version__: expected one of {known}, got {version!r}; install a supported vLLM"
        raise UnsupportedEngineError(message)
    return _ADAPTERS[release]


def __getattr__(name: str) -> Any:
    if name in _SHARED:
        adapter_package()
        return getattr(importlib.import_module(_SHARED[name]), name)
    if name not in _HOME:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(f"{adapter_package()}.{_HOME[name]}"), name)

"""Every error that kvpolicy raises on purpose, by who has to act next.

::

    KVPolicyError
    +-- PolicyUsageError (ValueError)      the caller: an argument or a call is wrong
    |   +-- SessionClosedError             a push after the end of a session
    +-- CapacityError                      expected at run time: retry smaller, or later
    |   +-- ChunkRefusedError              one chunk was not taken in; the session goes on without it
    +-- EngineContractError                the engine is not what the adapter was built for
    |   +-- UnsupportedEngineError         no adapter exists for this engine version
    +-- SessionFailedError                 the engine ended this one session
    +-- InvariantError                     a bug in kvpolicy
    +-- MissingExtraError (ImportError)    the installation: an optional dependency is absent

All of them survive pickling and copying, because they cross process boundaries: each passes to ``Exception``
exactly the arguments it was built from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class KVPolicyError(Exception):
    """Base of every error that kvpolicy raises on purpose."""


class PolicyUsageError(KVPolicyError, ValueError):
    """The caller made a mistake. ``reasons`` holds every one that was found, one sentence each."""

    def __init__(self, reasons: str | Iterable[str]) -> None:
        self.reasons: tuple[str, ...] = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        super().__init__(self.reasons)

    def __str__(self) -> str:
        return "\n".join(self.reasons)


class SessionClosedError(PolicyUsageError):
    """A chunk was pushed into a session that has ended."""


class CapacityError(KVPolicyError):
    """Something does not fit right now; it is expected to happen, and a smaller or later try may go well."""


class _CodedError(KVPolicyError):
    """An error with a code for programs and a message for people."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(code, message)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class ChunkRefusedError(_CodedError, CapacityError):
    """A chunk was not taken in. The session is as it was before the push and can go on."""


class EngineContractError(KVPolicyError):
    """The engine did something else, or is something else, than the adapter was built for."""


class UnsupportedEngineError(EngineContractError):
    """There is no adapter for this version of the engine."""


class SessionFailedError(_CodedError):
    """The engine ended this session. Others are not affected; open a new one."""


class InvariantError(KVPolicyError):
    """Something that cannot happen has happened: please report it as a bug of kvpolicy."""


class MissingExtraError(KVPolicyError, ImportError):
    """An optional dependency is not installed: ``module`` is missing, ``extra`` brings it."""

    def __init__(self, extra: str, module: str) -> None:
        self.extra = extra
        self.module = module
        super().__init__(extra, module, name=module)

    def __str__(self) -> str:
        pip = f"pip install 'kvpolicy[{self.extra}]'"
        return f"the module {self.module!r} is not installed; run: {pip}"

"""What ``kvpolicy serve`` takes beside vLLM's own flags. Imports neither vLLM nor torch."""

from __future__ import annotations

import argparse
import inspect
import re
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

from attrs import fields, frozen, resolve_types

from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_STREAMING = "enable_streaming"
_PREFIX = "session_"


@frozen(kw_only=True)
class ServeOptions:
    """Options of one server.

    Attributes:
        kv_cache_policy: for requests that bring none, a name or options as JSON; None: the KV cache is the stock one.
        enable_streaming: whether there are sessions, and routes for them.
        max_sessions: open at a time; None: one less than the engine's ``max_num_seqs``.
        settings: limits of the routes: what ``ServeFlags.settings`` makes.
    """

    kv_cache_policy: str | None = None
    enable_streaming: bool = False
    max_sessions: int | None = None
    settings: Any = None

    @property
    def is_stock(self) -> bool:
        """Whether nothing is asked for that vLLM's own server does not have."""
        return self.kv_cache_policy is None and not self.enable_streaming


@frozen
class ServeFlags:
    """Our flags: those of ``ServeOptions``, and one for each limit of the routes.

    Attributes:
        settings: the attrs class of these limits. Each has a default, and a sentence in the class's docstring; a wrong
            value is refused with reasons that begin with ``settings.``.
    """

    settings: type[Any]

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add them to a parser (vLLM's, or a plain one), in a group of their own."""
        group = parser.add_argument_group("kvpolicy", "Policies for the KV cache, and bounded streaming sessions.")
        group.add_argument(
            "--kv-cache-policy",
            metavar="NAME|JSON",
            default=argparse.SUPPRESS,
            help='Policy of requests that bring none: randkv, \'{"type": "randkv", "budget": 2048}\', ... '
            '"off": requests are dense unless they bring one. Unset: the KV cache is the stock one.',
        )
        group.add_argument(
            "--enable-streaming",
            action="store_true",
            default=argparse.SUPPRESS,
            help="Serve sessions under /v1/streaming. Unset: no such route exists.",
        )
        group.add_argument(
            "--max-sessions",
            type=int,
            metavar="N",
            default=argparse.SUPPRESS,
            help="Sessions open at a time, below --max-num-seqs. Unset: one less than it.",
        )
        sentences = self._sentences()
        for name, (kind, default) in self._fields().items():
            group.add_argument(
                _flag(name),
                dest=_destination(name),
                type=_reader(kind),
                metavar=_metavar(kind),
                default=argparse.SUPPRESS,
                help=f"{sentences.get(name, '')} Unset: {'none' if default is None else default}.".replace("%", "%%"),
            )

    def take(self, namespace: argparse.Namespace) -> tuple[ServeOptions, tuple[str, ...]]:
        """Take what our flags have put into a namespace out of it, so that what is left is vLLM's.

        Returns:
            The options, with default settings where those that were given cannot be, and every reason why there can be
            no such server. (vLLM may have more: who raises knows all of them.)
        """
        given = vars(namespace)
        ours = {name: given.pop(name) for name in ("kv_cache_policy", _STREAMING, "max_sessions") if name in given}
        limits = {name: given.pop(_destination(name)) for name in self._fields() if _destination(name) in given}
        reasons = []
        if not ours.get(_STREAMING):
            flags = ["--max-sessions"] * ("max_sessions" in ours) + [_flag(name) for name in limits]
            reasons += [f"{flag}: it is about sessions; add --enable-streaming, or leave it out" for flag in flags]
        settings = self.settings()
        try:
            settings = self.settings(**limits)
        except PolicyUsageError as error:
            reasons += [self._by_flag(reason) for reason in error.reasons]
        return ServeOptions(**ours, settings=settings), tuple(reasons)

    def _fields(self) -> Mapping[str, tuple[Any, Any]]:
        """Return type and default of every setting that has a flag of its own."""
        resolve_types(self.settings)
        # The engine has a limit of the same name, and the routes take its.
        return {each.name: (each.type, each.default) for each in fields(self.settings) if each.name != "max_sessions"}

    def _by_flag(self, reason: str) -> str:
        """Return a reason that names a setting as the user typed it."""
        for name in self._fields():
            reason = reason.replace(f"settings.{name}:", f"{_flag(name)}:")
        return reason

    def _sentences(self) -> dict[str, str]:
        """Return what each setting is, from the docstring of the settings: one place says it."""
        found: dict[str, str] = {}
        _, _, attributes = inspect.cleandoc(self.settings.__doc__ or "").partition("Attributes:")
        name = ""
        for line in inspect.cleandoc(attributes).splitlines():
            head, colon, text = line.partition(": ")
            if colon and not line.startswith(" ") and head.isidentifier():
                name, found[head] = head, text
            elif name:
                found[name] += " " + line.strip()
        return found


def as_typed(reason: str) -> str:
    """Return a reason that begins with the name of an argument with the flag in its place.

    >>> as_typed("async_scheduling: kvpolicy needs False, got True; leave it out")
    '--async-scheduling: kvpolicy needs False, got True; leave it out'
    """
    return re.sub(r"^[a-z]+(_[a-z]+)+(?=[:\[])", lambda name: "--" + name[0].replace("_", "-"), reason)


def _destination(name: str) -> str:
    """Return a name that none of vLLM's flags has."""
    return name if name.startswith(_PREFIX) else _PREFIX + name


def _flag(name: str) -> str:
    return "--" + _destination(name).replace("_", "-")


def _reader(kind: Any) -> Callable[[str], Any]:
    """Return what reads a value of this type: a number, or "none" where that is one."""
    kinds = get_args(kind) or (kind,)
    number = float if float in kinds else int

    def read(text: str) -> float | None:
        return None if text.lower() == "none" and NoneType in kinds else number(text)

    read.__name__ = number.__name__  # argparse says it where a value cannot be read
    return read


def _metavar(kind: Any) -> str:
    return "NUMBER" if float in (get_args(kind) or (kind,)) else "N"

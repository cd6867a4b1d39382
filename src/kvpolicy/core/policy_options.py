"""From what a user writes to a policy: a name, a mapping, a mapping as JSON, "off", or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.policies import OFF, KVPolicy, PolicyFactory, PolicyRegistry

_ARGUMENT = "kv_cache_policy"
_TYPE_KEY = "type"

Resolver = Callable[[str], PolicyFactory]
"""Finds the factory that a name with a colon in it stands for."""


def policy_from(value: object, registry: PolicyRegistry, resolve: Resolver | None = None) -> KVPolicy | None:
    """Return the policy that a user asked for; None for "off" and for None.

    A policy is a name, or a mapping of which ``type`` is the name and the rest are the options, or such a mapping
    as a JSON text.

    >>> from kvpolicy.core.policies import built_in_policies
    >>> policy_from('{"type": "sink_window", "budget": 256}', built_in_policies())
    SinkWindow(budget=256, buffer_size=64)
    >>> policy_from("off", built_in_policies()) is None
    True

    Args:
        value: what the user wrote.
        registry: the names that exist.
        resolve: for names like ``package.module:attribute``; None: there are no such names.

    Raises:
        PolicyUsageError: no such value, text that is not JSON, no ``type``, an unknown name, options that the policy
            rejects: every reason that can be known.
    """
    try:
        return _policy(value, registry, resolve)
    # Any client may send such a value, and a message that shows it would fail as well.
    except RecursionError:
        raise _error(
            "expected a name, a mapping, or a JSON object as text, got one that is nested too deeply"
        ) from None


def as_text(value: object) -> str:
    """Return what a user wrote as a name or a JSON text, so that it can travel between processes.

    >>> as_text({"type": "randkv", "budget": 256})
    '{"type": "randkv", "budget": 256}'

    Raises:
        PolicyUsageError: JSON has no such value.
    """
    if isinstance(value, str):
        return str(value)
    try:
        return json.dumps(dict(value) if isinstance(value, Mapping) else value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(f"expected options that JSON has: {error}") from None


def _policy(value: object, registry: PolicyRegistry, resolve: Resolver | None) -> KVPolicy | None:
    if value is None:
        return None
    name, options = _named(value, registry, resolve)
    if name == OFF:
        if options:
            raise _error(f"{OFF!r} takes no options, got {', '.join(repr(key) for key in options)}")
        return None
    if resolve is not None and ":" in name:
        return _made(name, resolve(name), options)
    if name not in registry.names:
        raise _error(f"unknown name {name!r}; {_known(registry, resolve)}")
    return _made(name, lambda given: registry.create(name, given), options)


def _named(value: object, registry: PolicyRegistry, resolve: Resolver | None) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the options in a value."""
    if isinstance(value, str):
        if not value.lstrip().startswith("{"):
            return value, {}
        value = _parsed(value)
    if not isinstance(value, Mapping):
        raise _error(f"expected a name, a mapping, a JSON object as text, or None, got {value!r}")
    options = dict(value)
    if _TYPE_KEY not in options:
        keys = ", ".join(repr(key) for key in options) or "no keys"
        raise _error(f"expected the key {_TYPE_KEY!r} with a policy's name, got {keys}; {_known(registry, resolve)}")
    name = options.pop(_TYPE_KEY)
    if not isinstance(name, str):
        raise _error(f"{_TYPE_KEY}: expected a policy's name, got {name!r}; {_known(registry, resolve)}")
    return name, options


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _error(f"expected a name or a JSON object, got text that is neither: {error}") from None


def _made(name: str, factory: PolicyFactory, options: Mapping[str, Any]) -> KVPolicy:
    """Return what a factory makes of the options."""
    try:
        policy = factory(options)
    except PolicyUsageError as error:
        raise _error(*error.reasons) from None
    except RecursionError:
        raise
    except Exception as error:
        # However a class of somebody else's turns down arguments.
        raise _error(f"{name!r} does not take the options {dict(options)!r}: {error}") from error
    if not isinstance(policy, KVPolicy):
        raise _error(f"{name!r}: expected a policy (methods schedule and event_for), got {policy!r}")
    return policy


def _known(registry: PolicyRegistry, resolve: Resolver | None) -> str:
    others = "" if resolve is None else ", or package.module:attribute"
    return f"known names: {', '.join((OFF, *registry.names))}{others}"


def _error(*reasons: str) -> PolicyUsageError:
    return PolicyUsageError([f"{_ARGUMENT}: {reason}" for reason in reasons])

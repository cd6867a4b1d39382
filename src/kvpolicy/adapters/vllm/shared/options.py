"""The engine-wide options of kvpolicy, read from ``additional_config["kvpolicy"]``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from attrs import frozen

from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.policies import built_in_policies
from kvpolicy.core.policy_options import policy_from

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvpolicy.core.policies import KVPolicy, PolicyFactory

CONFIG_KEY = "kvpolicy"
POLICY_KEY = "kv_cache_policy"
"""Name of the policy option: the facades' argument, the engine's option, and a request's ``extra_args`` key."""

_SESSIONS_KEY = "max_sessions"
_IMPORTS_KEY = "policies"
_KNOWN_KEYS = (_SESSIONS_KEY, POLICY_KEY, _IMPORTS_KEY)


@frozen(kw_only=True)
class EngineOptions:
    """Options of one engine.

    Attributes:
        max_sessions: None: one less than the engine's ``max_num_seqs``.
        compacts: whether requests can have a policy at all (false: the engine's KV cache is the stock one).
        kv_cache_policy: of requests that bring none; None: they are dense.
        imports: policies of others, as ``package.module:attribute``, that a request may ask for.
    """

    max_sessions: int | None = None
    compacts: bool = False
    kv_cache_policy: KVPolicy | None = None
    imports: frozenset[str] = frozenset()

    @classmethod
    def from_config(cls, config: VllmConfig) -> EngineOptions:
        """Read and check the options of an engine configuration.

        Raises:
            PolicyUsageError: an unknown key, a wrong type, more sessions than the engine has slots for, or a policy
                that does not exist or cannot be so.
        """
        additional = config.additional_config
        value = additional.get(CONFIG_KEY, {}) if isinstance(additional, dict) else {}
        if not isinstance(value, dict):
            reason = f"additional_config[{CONFIG_KEY!r}]: expected a mapping, got {type(value).__name__}"
            raise PolicyUsageError(reason)
        reasons = [
            f"additional_config[{CONFIG_KEY!r}]: unknown key {key!r}; known keys: {', '.join(_KNOWN_KEYS)}"
            for key in value
            if key not in _KNOWN_KEYS
        ]
        max_sessions = value.get(_SESSIONS_KEY)
        most = config.scheduler_config.max_num_seqs - 1
        if max_sessions is not None and (type(max_sessions) is not int or not 1 <= max_sessions <= most):
            reasons.append(
                f"{_SESSIONS_KEY}: expected an integer from 1 to {most} (one less than --max-num-seqs), "
                f"got {max_sessions!r}"
            )
        imports = value.get(_IMPORTS_KEY, ())
        if not isinstance(imports, list | tuple) or not all(isinstance(name, str) and ":" in name for name in imports):
            reasons.append(f"{_IMPORTS_KEY}: expected a list of names like package.module:attribute, got {imports!r}")
            imports = ()
        asked = value.get(POLICY_KEY)
        policy = None
        try:
            # Whoever starts an engine may import what they like.
            policy = policy_from(asked, built_in_policies(), _imported)
            for name in imports:
                _imported(name)
        except PolicyUsageError as error:
            reasons += error.reasons
        if reasons:
            raise PolicyUsageError(reasons)
        return cls(
            max_sessions=max_sessions,
            compacts=asked is not None,
            kv_cache_policy=policy,
            imports=frozenset(imports),
        )

    def requested_policy(self, value: object) -> KVPolicy | None:
        """Return the policy that a request asks for; None for "off".

        Any client may send such a request, so nothing is imported but what the engine was started with.

        Raises:
            PolicyUsageError: every reason why there is no such policy.
        """
        return policy_from(value, built_in_policies(), self._allowed)

    def _allowed(self, name: str) -> PolicyFactory:
        if name not in self.imports:
            known = ", ".join(sorted(self.imports)) or "none"
            reason = (
                f"{POLICY_KEY}: {name!r} is not one of the {_IMPORTS_KEY} that the engine was started with: {known}"
            )
            raise PolicyUsageError(reason)
        return _imported(name)


def policy_errors(value: object) -> tuple[str, ...]:
    """Return why whoever starts an engine cannot have a policy; empty if they can."""
    try:
        policy_from(value, built_in_policies(), _imported)
    except PolicyUsageError as error:
        return error.reasons
    return ()


def _imported(name: str) -> PolicyFactory:
    module_name, _, attribute = name.partition(":")
    try:
        factory: PolicyFactory = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # a module of somebody else's may raise anything when it is imported
        reason = f"{POLICY_KEY}: expected {name!r} to name a factory of policies: {error}"
        raise PolicyUsageError(reason) from error
    return factory

"""The engine-wide options of sessions, read once from ``additional_config["kvpolicy"]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG_KEY = "kvpolicy"


@frozen(kw_only=True)
class SessionOptions:
    """Options of one engine. ``max_sessions`` None: one less than the engine's ``max_num_seqs``."""

    max_sessions: int | None = None

    @classmethod
    def from_config(cls, config: VllmConfig) -> SessionOptions:
        """Read and check the options of an engine configuration.

        Raises:
            PolicyUsageError: an unknown key, a wrong type, or more sessions than the engine has slots for.
        """
        additional = config.additional_config
        value = additional.get(CONFIG_KEY, {}) if isinstance(additional, dict) else {}
        if not isinstance(value, dict):
            reason = f"additional_config[{CONFIG_KEY!r}]: expected a mapping, got {type(value).__name__}"
            raise PolicyUsageError(reason)
        reasons = [
            f"additional_config[{CONFIG_KEY!r}]: unknown key {key!r}; known keys: max_sessions"
            for key in value
            if key != "max_sessions"
        ]
        max_sessions = value.get("max_sessions")
        most = config.scheduler_config.max_num_seqs - 1
        if max_sessions is not None and (type(max_sessions) is not int or not 1 <= max_sessions <= most):
            reasons.append(
                f"max_sessions: expected an integer from 1 to {most} (one less than --max-num-seqs), "
                f"got {max_sessions!r}"
            )
        if reasons:
            raise PolicyUsageError(reasons)
        return cls(max_sessions=max_sessions)

    @staticmethod
    def trained_range(config: VllmConfig) -> int:
        """Return the number of positions the model was trained for (the context limit where it does not say)."""
        text_config = config.model_config.hf_text_config
        trained = getattr(text_config, "max_position_embeddings", None)
        return int(trained or config.model_config.max_model_len)

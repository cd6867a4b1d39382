"""How many positions a model's rotary embedding has rows for in one engine: sessions must stay below that.

vLLM looks the rotation of a token up in a table, by its position, and does not ask whether the table is that long: a
row beyond it is whatever lies there in memory, or a row of the other half of a table of two. The length depends
on the type of scaling, so each type is listed here with its own; ``loaded_model`` compares them with the tables.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.transformers_utils.config import is_rope_parameters_nested

from kvpolicy.core.checks import reject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vllm.config import VllmConfig

    # Of the parameters of one rotary embedding, the model's own length, and the engine's context limit.
    RowsOf = Callable[[Mapping[str, Any], int, int], float]


def position_limit(config: VllmConfig) -> int:
    """Return the number of positions that can be used: 0 up to, and without, it.

    A function of the configuration alone, so that the front end, the scheduler and the workers find the same.

    Raises:
        PolicyUsageError: every reason why the model's positions cannot be used.
    """
    reject(position_errors(config))
    return min(map(int, _rows(config).values()))


def position_errors(config: VllmConfig) -> tuple[str, ...]:
    """Return why the positions of a model with rotary embeddings cannot be used; empty if they can."""
    model = config.model_config
    if unknown := list(_unknown(config)):
        return tuple(f"--model {model.model}: rotary position embeddings are needed, got {what}" for what in unknown)
    return tuple(
        f"--max-model-len {model.max_model_len}: expected at most {int(rows)}, for which the model's rotary embedding "
        f"({kind}) has rows; vLLM would read others beyond them"
        for kind, rows in _rows(config).items()
        if model.max_model_len > int(rows)
    )


def _unknown(config: VllmConfig) -> Iterator[str]:
    """Yield what the configuration asks for and is not listed here."""
    for rope in _embeddings(config):
        if rope.get("use_fope"):
            yield "Fourier position embeddings (use_fope), whose table is made anew at the first step"
        if _kind(rope) not in _ROWS:
            yield f"scaling of type {_kind(rope)!r} (rope_type); known types: {', '.join(_ROWS)}"


def _rows(config: VllmConfig) -> dict[str, float]:
    """Return the rows of each type of rotary embedding that the model has."""
    model = config.model_config
    trained = _trained_length(model.hf_text_config) or model.max_model_len
    return {_kind(rope): _ROWS[_kind(rope)](rope, trained, model.max_model_len) for rope in _embeddings(config)}


def _trained_length(text: Any) -> int | None:
    """Return the length that the model's code makes its tables of; None: it is in no field that is known.

    What the engine needs takes its place then, and is compared with the tables when they are there.
    """
    names = ["max_position_embeddings"]
    if getattr(text, "model_type", None) == "cohere":
        names.insert(0, "model_max_length")
    return next((int(length) for name in names if (length := getattr(text, name, None))), None)


def _embeddings(config: VllmConfig) -> tuple[Mapping[str, Any], ...]:
    """Return the parameters of each rotary embedding: models may have one for each kind of layer."""
    rope = getattr(config.model_config.hf_text_config, "rope_parameters", None) or {}
    return tuple(rope.values()) if is_rope_parameters_nested(rope) else (rope,)


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", "default"))


def _trained(_rope: Mapping[str, Any], trained: int, _context: int) -> float:
    return trained


def _stretched(rope: Mapping[str, Any], trained: int, _context: int) -> float:
    return trained * float(rope["factor"])


def _from_original(rope: Mapping[str, Any], _trained: int, _context: int) -> float:
    return float(rope["original_max_position_embeddings"] * rope["factor"])


def _one_half(rope: Mapping[str, Any], trained: int, context: int) -> float:
    # Short factors, then long ones, in one table; the context limit chooses a half for good.
    original = int(rope["original_max_position_embeddings"])
    return original if context <= original else trained


def _telechat(rope: Mapping[str, Any], trained: int, context: int) -> float:
    return trained if "original_max_position_embeddings" in rope else _stretched(rope, trained, context)


_ROWS: Mapping[str, RowsOf] = MappingProxyType(
    {
        "default": _trained,
        "proportional": _trained,
        "llama3": _trained,
        "ntk": _trained,
        # Stretched for its whole length, and not as a sequence grows: a row depends on the position alone.
        "dynamic": _trained,
        "linear": _stretched,
        "yarn": _from_original,
        "deepseek_yarn": _from_original,
        "deepseek_llama_scaling": _from_original,
        "telechat3-yarn": _telechat,
        "longrope": _one_half,
    }
)

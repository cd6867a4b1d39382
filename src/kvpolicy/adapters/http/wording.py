"""What is wrong with a request, in the words of kvpolicy: where, what was expected, and what came."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# What the library calls otherwise than a request does. (Budgets have one name.)
_TYPED: Mapping[str, str] = MappingProxyType(
    {"sampling_params": "sampling", "max_tokens": "sampling.max_tokens", "turn": "text"}
)
_INTEGER, _BOOLEAN, _OBJECT = "an integer", "true or false", "an object"
# By pydantic's name of the error.
_EXPECTED: Mapping[str, str] = MappingProxyType(
    {
        "int_type": _INTEGER,
        "int_parsing": _INTEGER,
        "int_parsing_size": _INTEGER,
        "int_from_float": _INTEGER,
        "float_type": "a number",
        "bool_type": _BOOLEAN,
        "bool_parsing": _BOOLEAN,
        "string_type": "text",
        "list_type": "a list",
        "dict_type": _OBJECT,
        "model_type": _OBJECT,
        "model_attributes_type": _OBJECT,
        "missing": "a value",
        "string_too_short": "at least {min_length} character",
        "greater_than_equal": "at least {ge}",
        "less_than_equal": "at most {le}",
    }
)
_OF_NUMBERS = ("greater_than_equal", "less_than_equal")
# How much of a name that means nothing here is repeated.
_NUM_SHOWN = 40
_MOST = 1 << 64


def as_typed(reason: str) -> str:
    """Return a reason that begins with the name of an argument with the field of a request in its place.

    >>> as_typed("sampling_params.n: expected 1, got 2")
    'sampling.n: expected 1, got 2'
    """
    return re.sub(r"^\w+(?=[.:])", lambda name: _TYPED.get(name[0], name[0]), reason)


def field_reason(error: Mapping[str, Any], known: Iterable[str]) -> str:
    """Return a sentence for one of pydantic's errors. Text is not repeated: it may be a user's.

    Args:
        error: with ``loc``, ``type``, ``msg`` and, where there are any, ``input`` and ``ctx``.
        known: the names of what there could have been in place of an unknown one.
    """
    where = ".".join(str(part)[:_NUM_SHOWN] for part in error["loc"]) or "body"
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"{where}: unknown; known here: {', '.join(known) or 'nothing'}"
    if kind not in _EXPECTED:
        return f"{where}: {error['msg']}"
    expected = _EXPECTED[kind].format(**error.get("ctx", {}))
    if kind == "missing":
        return f"{where}: expected {expected}, got none"
    value = error["input"]
    # In a query a number is text.
    is_number = kind in _OF_NUMBERS and isinstance(value, str)
    return f"{where}: expected {expected}, got {value[:_NUM_SHOWN] if is_number else _came(value)}"


def _came(value: object) -> str:  # noqa: PLR0911 - one line for each kind
    """Return what a JSON value is, in a word; numbers themselves."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() if abs(value) > _MOST:
            return "a number of more than 64 bits"
        case int() | float():
            return str(value)
        case "":
            return "empty text"
        case str():
            return "text"
        case list():
            return "a list"
        case _:
            return "an object"

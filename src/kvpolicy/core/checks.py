"""Checks shared by the core's values. Each returns its complaints, so that all can be reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from attrs import AttrsInstance, fields

from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

_T = TypeVar("_T", bound=AttrsInstance)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer. A bool is not one: ``True`` tokens is a mistake, not a count."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is a real number (and no bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_at_least(value: object, least: int) -> TypeGuard[int]:
    """Return whether a value is an integer and not below ``least``."""
    return is_integer(value) and value >= least


def integer_errors(
    name: str, value: object, least: int, *, because: str = "", optional: bool = False
) -> tuple[str, ...]:
    """Return the complaint about an argument that must be an integer >= ``least``; empty if it is one.

    >>> integer_errors("limits.block_size", 0, 1)
    ('limits.block_size: expected an integer >= 1, got 0',)
    """
    if is_at_least(value, least) or (optional and value is None):
        return ()
    or_none = " or None" if optional else ""
    bound = f"{least} ({because})" if because else f"{least}"
    return (f"{name}: expected an integer >= {bound}{or_none}, got {value!r}",)


def instance_errors(name: str, value: object, kind: type) -> tuple[str, ...]:
    """Return the complaint about an argument that must be of type ``kind``; empty if it is."""
    if isinstance(value, kind):
        return ()
    return (f"{name}: expected {kind.__name__}, got {value!r}",)


def text_errors(name: str, value: object) -> tuple[str, ...]:
    r"""Return the complaint about an argument that must be text which UTF-8 can encode; empty if it is.

    Python's strings can hold half of a surrogate pair, which no encoding has and no tokenizer takes.

    >>> text_errors("turn", "hello \ud83d")
    ("turn: expected text that UTF-8 can encode, got '\\ud83d' at character 6",)
    """
    if not isinstance(value, str):
        return (f"{name}: expected a string, got {value!r}",)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = value[error.start]
        return (f"{name}: expected text that UTF-8 can encode, got {half!r} at character {error.start}",)
    return ()


def media_errors(name: str, media: object) -> tuple[str, ...]:
    """Return the complaint about an argument that must be a tuple of media identifiers; empty if it is."""
    if isinstance(media, tuple) and all(isinstance(item, str) for item in media):
        return ()
    return (f"{name}: expected a tuple of strings, got {media!r}",)


def reject(reasons: Iterable[str]) -> None:
    """Raise if there are complaints.

    Raises:
        PolicyUsageError: with all of them.
    """
    if found := tuple(reasons):
        raise PolicyUsageError(found)


def from_mapping(cls: type[_T], mapping: Mapping[str, Any], *, name: str) -> _T:
    """Return the attrs value that a mapping (a JSON object, say) describes; what is left out has its default.

    Raises:
        PolicyUsageError: unknown keys, wrong types and impossible values, all at once.
    """
    reject(instance_errors(name, mapping, Mapping))
    known = [attribute.name for attribute in fields(cls)]
    reasons = [f"{name}: unknown key {key!r}; known keys: {', '.join(known)}" for key in mapping if key not in known]
    try:
        value = cls(**{key: value for key, value in mapping.items() if key in known})
    except PolicyUsageError as error:
        raise PolicyUsageError([*reasons, *error.reasons]) from None
    reject(reasons)
    return value

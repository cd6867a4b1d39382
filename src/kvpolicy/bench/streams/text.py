"""The text that is streamed, in chunks of about equal size, cut where a reader would pause."""

from __future__ import annotations

from importlib.resources import files
from itertools import islice
from typing import TYPE_CHECKING

from attrs import frozen

from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

# A chunk ends with a sentence where one ends in the last part of it; shorter than this share it never is.
_SHORTEST_SHARE = 0.6
_SENTENCE_ENDS = (".", "!", "?", ":", ";")
_CLOSERS = "\"')]\u2019\u201d"


@frozen
class _Word:
    text: str
    num_tokens: int

    @property
    def ends_sentence(self) -> bool:
        return self.text.rstrip(_CLOSERS).endswith(_SENTENCE_ENDS)


def read_text(path: Path | None) -> str:
    """Return the text to stream.

    Raises:
        PolicyUsageError: the file cannot be read as UTF-8 text.
    """
    if path is None:
        return (files("kvpolicy.bench.streams") / "harbour_log.txt").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyUsageError(f"--text: expected a UTF-8 text file, got {path}: {error}") from error


def take_chunks(text: str, num_chunks: int, *, max_tokens: int, count: Callable[[str], int]) -> tuple[str, ...]:
    """Return the first ``num_chunks`` chunks of a text; a text that ends before is read again from its start.

    White space (line ends too) counts as one space. A chunk is the longest run of words with at most
    ``max_tokens`` tokens, shortened to the last end of a sentence in it if that leaves 60 % of
    ``max_tokens``. A single word with more tokens is a chunk of its own.

    >>> take_chunks("One two. Three four five six.", 3, max_tokens=3, count=lambda text: 1)
    ('One two.', 'Three four five', 'six.')

    Args:
        text: Any text with at least one word.
        num_chunks: How many chunks to return.
        max_tokens: Tokens in a chunk, at most.
        count: Number of tokens of a string; called once per distinct word, with the space before it.

    Raises:
        PolicyUsageError: The text has no words.
    """
    sizes: dict[str, int] = {}
    words = []
    for word in text.split():
        if word not in sizes:
            sizes[word] = max(1, count(f" {word}"))
        words.append(_Word(word, sizes[word]))
    if not words:
        raise PolicyUsageError("text: expected at least one word, got none")
    return tuple(islice(_endless(words, max_tokens), num_chunks))


def _endless(words: Sequence[_Word], max_tokens: int) -> Iterator[str]:
    start = 0
    while True:
        end = _end_of_chunk(words, start, max_tokens)
        yield " ".join(word.text for word in words[start:end])
        start = end if end < len(words) else 0


def _end_of_chunk(words: Sequence[_Word], start: int, max_tokens: int) -> int:
    """Return the index behind the last word of the chunk that begins at ``start``; above ``start``."""
    num_tokens = words[start].num_tokens
    end, sentence_end = start + 1, None
    while end < len(words) and num_tokens + words[end].num_tokens <= max_tokens:
        num_tokens += words[end].num_tokens
        end += 1
        if words[end - 1].ends_sentence and num_tokens >= _SHORTEST_SHARE * max_tokens:
            sentence_end = end
    return sentence_end or end

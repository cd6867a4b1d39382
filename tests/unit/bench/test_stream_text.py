"""How a text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.bench.streams.text import take_chunks
from kvpolicy.core.errors import PolicyUsageError


def one_per_word(_word: str) -> int:
    return 1


def one_per_letter(word: str) -> int:
    return len(word.strip())


def test_a_chunk_ends_with_a_sentence_when_that_leaves_enough() -> None:
    text = "a b c d. e f g h i j k l"

    assert take_chunks(text, 2, max_tokens=6, count=one_per_word) == ("a b c d.", "e f g h i j")


def test_a_sentence_that_ends_too_early_does_not_end_the_chunk() -> None:
    assert take_chunks("a b. c d e f g h", 1, max_tokens=6, count=one_per_word) == ("a b. c d e f",)


def test_the_last_sentence_that_fits_counts() -> None:
    assert take_chunks("a b c d. e. f g", 1, max_tokens=6, count=one_per_word) == ("a b c d. e.",)


def test_quotes_behind_a_full_stop_belong_to_the_sentence() -> None:
    text = '"a b c d." e f g h'

    assert take_chunks(text, 1, max_tokens=5, count=one_per_word) == ('"a b c d."',)


def test_a_word_above_the_limit_is_a_chunk_of_its_own() -> None:
    assert take_chunks("aa bbbbbbbb cc", 3, max_tokens=4, count=one_per_letter) == ("aa", "bbbbbbbb", "cc")


def test_a_text_that_ends_is_read_again() -> None:
    assert take_chunks("a b c", 4, max_tokens=2, count=one_per_word) == ("a b", "c", "a b", "c")


def test_line_ends_are_spaces() -> None:
    assert take_chunks("a\n\nb\tc", 1, max_tokens=9, count=one_per_word) == ("a b c",)


def test_words_are_counted_with_the_space_before_them() -> None:
    seen: list[str] = []

    def count(word: str) -> int:
        seen.append(word)
        return 1

    take_chunks("tick tock tick", 1, max_tokens=3, count=count)

    assert seen == [" tick", " tock"]


@pytest.mark.parametrize("text", ["", " \n "])
def test_a_text_without_words_is_refused(text: str) -> None:
    with pytest.raises(PolicyUsageError, match="text: expected at least one word"):
        take_chunks(text, 1, max_tokens=5, count=one_per_word)


@given(words=st.lists(st.text("ab.", min_size=1, max_size=9), min_size=1, max_size=40), limit=st.integers(1, 12))
def test_chunks_cover_the_text_in_order_and_keep_to_the_limit(words: list[str], limit: int) -> None:
    chunks = take_chunks(" ".join(words), len(words), max_tokens=limit, count=one_per_letter)

    taken = [word for chunk in chunks for word in chunk.split()]
    assert len(taken) >= len(words)
    assert taken[: len(words)] == words
    for chunk in chunks:
        parts = chunk.split()
        assert parts
        assert len(parts) == 1 or sum(map(len, parts)) <= limit

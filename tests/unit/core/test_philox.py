"""The generator against the published vectors, and the keys of requests."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from struct import unpack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.philox import WORD_LIMIT, key_of, philox4x32

VECTORS = Path(__file__).parents[2] / "data" / "philox4x32-10.json"

words = st.integers(0, WORD_LIMIT - 1)


def test_the_published_vectors() -> None:
    vectors = json.loads(VECTORS.read_text(encoding="utf-8"))["vectors"]
    assert len(vectors) == 3
    for vector in vectors:
        counter, key, output = (tuple(int(word, 16) for word in vector[name]) for name in ("counter", "key", "output"))
        assert philox4x32(counter, key) == output  # type: ignore[arg-type]  # lengths are the file's


@given(st.tuples(words, words, words, words), st.tuples(words, words), st.integers(0, 127))
def test_outputs_are_words_and_every_bit_of_the_counter_matters(
    counter: tuple[int, int, int, int], key: tuple[int, int], bit: int
) -> None:
    output = philox4x32(counter, key)
    assert all(0 <= word < WORD_LIMIT for word in output)
    changed = list(counter)
    changed[bit // 32] ^= 1 << bit % 32
    assert philox4x32((changed[0], changed[1], changed[2], changed[3]), key) != output


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("request_key", ["", "a", "chat-7/0", "größer 🙂"])
def test_a_key_is_the_digest_as_two_little_endian_words(seed: int, request_key: str) -> None:
    data = seed.to_bytes(8, "little") + request_key.encode("utf-8")
    assert key_of(seed, request_key) == unpack("<II", blake2b(data, digest_size=8).digest())


def test_neither_seed_nor_request_share_a_key() -> None:
    keys = {key_of(seed, f"{request}") for seed in range(20) for request in range(20)}
    assert len(keys) == 400


@pytest.mark.parametrize("seed", [-1, 2**64, True, 1.0, None])
def test_a_seed_has_64_bits(seed: Any) -> None:
    with pytest.raises(PolicyUsageError, match=r"seed: expected an integer from 0 to 2\*\*64 - 1, got "):
        key_of(seed, "a")


@pytest.mark.parametrize(
    ("request_key", "message"),
    [
        (b"a", "request_key: expected a string, got b'a'"),
        (None, "request_key: expected a string, got None"),
        ("\ud800", "request_key: expected text that UTF-8 can encode, got "),
    ],
)
def test_a_request_key_is_text(request_key: Any, message: str) -> None:
    with pytest.raises(PolicyUsageError, match=message):
        key_of(0, request_key)

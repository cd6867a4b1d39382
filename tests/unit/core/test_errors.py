"""The error tree: who is whose, what an error carries, and that all of it survives a process boundary."""

from __future__ import annotations

import copy
import pickle

import pytest

from kvpolicy.core import errors
from kvpolicy.core.errors import (
    CapacityError,
    ChunkRefusedError,
    EngineContractError,
    InvariantError,
    KVPolicyError,
    MissingExtraError,
    PolicyUsageError,
    SessionClosedError,
    SessionFailedError,
    UnsupportedEngineError,
)

ALL = [
    KVPolicyError("message"),
    PolicyUsageError("one reason"),
    PolicyUsageError(["one", "two"]),
    SessionClosedError("session: it was closed"),
    CapacityError("no room"),
    ChunkRefusedError("chunk_too_long", "it is too long"),
    EngineContractError("unexpected"),
    UnsupportedEngineError("unknown version"),
    SessionFailedError("engine", "it died"),
    InvariantError("a bug"),
    MissingExtraError(extra="vllm", module="torch"),
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_and_copying(error: KVPolicyError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):  # noqa: S301 - our own
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)


def test_every_error_is_in_this_table() -> None:
    public = {
        value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and not name.startswith("_")
    }
    assert public == {type(error) for error in ALL}


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (PolicyUsageError, ValueError),
        (SessionClosedError, PolicyUsageError),
        (ChunkRefusedError, CapacityError),
        (UnsupportedEngineError, EngineContractError),
        (MissingExtraError, ImportError),
    ],
)
def test_an_error_can_be_caught_by_its_branch(error: type[Exception], base: type[Exception]) -> None:
    assert issubclass(error, base)
    assert issubclass(error, KVPolicyError)


def test_a_usage_error_carries_all_reasons_one_per_line() -> None:
    assert PolicyUsageError("one").reasons == ("one",)
    error = PolicyUsageError(reason for reason in ("one", "two"))
    assert error.reasons == ("one", "two")
    assert str(error) == "one\ntwo"


@pytest.mark.parametrize("kind", [ChunkRefusedError, SessionFailedError])
def test_an_error_with_a_code_shows_both(kind: type[ChunkRefusedError | SessionFailedError]) -> None:
    error = kind("some_code", "what happened")
    assert (error.code, error.message) == ("some_code", "what happened")
    assert str(error) == "some_code: what happened"


def test_a_missing_extra_says_what_to_install() -> None:
    error = MissingExtraError(extra="vllm", module="torch")
    assert (error.extra, error.module, error.name) == ("vllm", "torch", "torch")
    assert "'torch'" in str(error)
    assert "pip install 'kvpolicy[vllm]'" in str(error)

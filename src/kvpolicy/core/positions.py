"""From the index of a token to where it is cached and to the position it is rotated by."""

from __future__ import annotations

from attrs import frozen

from kvpolicy.core.checks import integer_errors, reject
from kvpolicy.core.errors import InvariantError
from kvpolicy.core.spaces import KVIndex, LogicalPosition


@frozen(kw_only=True)
class PositionMap:
    """The two shifts between a token's index in the engine's arrays, its KV index and its logical position.

    Bounded sessions (A) take evicted tokens out of the arrays at a chunk boundary. The index space shrinks
    with the cache, so an index is a KV index (``kv_shift`` 0), while survivors keep their positions: new
    tokens are rotated by their index plus everything evicted so far (``rope_shift`` = evicted width). After
    32 evicted tokens the token at index 100:

    >>> session = PositionMap(rope_shift=32)
    >>> session.slot_index(100), session.rope_position(100)
    (100, 132)

    RandKV (B) never shortens the arrays. An index stays the logical position (``rope_shift`` 0) and lies
    ahead of the KV index by the entries dropped so far (``kv_shift``). After 64 dropped entries the token at
    index 2500:

    >>> generation = PositionMap(kv_shift=64)
    >>> generation.slot_index(2500), generation.rope_position(2500)
    (2436, 2500)

    Both hold for tokens that are written from now on, which is what an engine computes them for.
    """

    kv_shift: int = 0
    rope_shift: int = 0

    def __attrs_post_init__(self) -> None:
        reject(
            integer_errors("positions.kv_shift", self.kv_shift, 0)
            + integer_errors("positions.rope_shift", self.rope_shift, 0)
        )

    def slot_index(self, index: int) -> KVIndex:
        """Return the KV index of the token at ``index``, from which its slot follows.

        Raises:
            InvariantError: more entries were dropped than lie below it.
        """
        if index < self.kv_shift:
            raise InvariantError(f"index: expected an integer >= {self.kv_shift} (kv_shift), got {index}")
        return KVIndex(index - self.kv_shift)

    def rope_position(self, index: int) -> LogicalPosition:
        """Return the logical position of the token at ``index``."""
        return LogicalPosition(index + self.rope_shift)

"""What a session says: one reply per chunk, and counts over its life."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from kvpolicy.core.counts import SessionCounts


@frozen
class SegmentView:
    """One segment of a session, oldest first: ``kind`` is "anchor", "content" or "reply"."""

    kind: str
    num_tokens: int


@frozen(kw_only=True)
class Reply:
    """The answer to one chunk.

    ``ttft_s`` and ``total_s`` run from the call of ``push`` to the first token and to the end. ``num_chunk_tokens``
    is the length of the chunk itself. ``num_evicted_tokens`` is the number of tokens that this chunk pushed out;
    ``resident_tokens`` and ``num_blocks`` are what the session holds now. ``logprobs`` holds one mapping per token
    where the sampling parameters ask for log-probabilities.
    """

    chunk: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    ttft_s: float
    total_s: float
    num_chunk_tokens: int
    num_evicted_tokens: int
    resident_tokens: int
    num_blocks: int
    consolidated: bool
    logprobs: tuple[Any, ...] = ()


@frozen(kw_only=True)
class SessionStats(SessionCounts):
    """Counts over the life of a session, and what it held when its last reply ended."""

    num_chunks: int = 0
    num_refused: int = 0
    num_reply_tokens: int = 0
    resident_tokens: int = 0
    num_blocks: int = 0
    num_segments: int = 0
    next_position: int = 0
    num_free_blocks: int = 0
    segments: tuple[SegmentView, ...] = ()

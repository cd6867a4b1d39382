"""What a server answers, as values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from attrs import fields_dict, frozen

from kvpolicy.core.counts import SessionCounts

if TYPE_CHECKING:
    from collections.abc import Mapping


@frozen(kw_only=True)
class FrameReply:
    """The reply to one chunk. ``ttft_s`` and ``latency_s`` are the server's, without the network."""

    session_id: str
    frame_index: int
    text: str
    finish_reason: str
    stop_reason: int | str | None
    chunk_tokens: int
    reply_tokens: int
    ttft_s: float
    latency_s: float
    num_evicted_tokens: int
    resident_tokens: int
    blocks: int
    consolidated: bool

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Return the reply in a body. Fields of newer servers are left out."""
        return cls(**{name: body[name] for name in fields_dict(cls)})


@frozen
class Segment:
    """One stretch of what a session remembers: ``kind`` is "anchor", "content" or "reply"."""

    kind: str
    tokens: int


@frozen(kw_only=True)
class SessionStatus(SessionCounts):
    """A session as of its last reply."""

    session_id: str
    state: Literal["idle", "pending", "ended"]
    reason: str | None
    frames: int
    refused: int
    reply_tokens: int
    resident_tokens: int
    blocks: int
    max_blocks: int
    segments: tuple[Segment, ...]
    age_s: float
    idle_s: float

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Return the status in a body. Fields of newer servers are left out."""
        values = {name: body[name] for name in fields_dict(cls)}
        values["segments"] = tuple(Segment(segment["kind"], segment["tokens"]) for segment in body["segments"])
        return cls(**values)


@frozen(kw_only=True)
class OpenedSession:
    """What opening a session returned."""

    session_id: str
    model: str
    max_blocks: int
    retention: Mapping[str, Any] | None
    sampling: Mapping[str, Any]

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Return the session in a body. Fields of newer servers are left out."""
        return cls(**{name: body[name] for name in fields_dict(cls)})

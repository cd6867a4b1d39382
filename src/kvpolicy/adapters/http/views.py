"""What the engine says, as bodies of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpolicy.adapters.http.schemas import FrameReply, SegmentBody, StatusReply

if TYPE_CHECKING:
    from kvpolicy.core.replies import Reply, SessionStats


def reply_body(session_id: str, index: int, reply: Reply) -> FrameReply:
    """Return the answer to a push. ``index`` is the frontend's: a session of the engine counts for itself."""
    return FrameReply(
        session_id=session_id,
        frame_index=index,
        text=reply.text,
        finish_reason=reply.finish_reason,
        stop_reason=reply.stop_reason,
        chunk_tokens=reply.num_chunk_tokens,
        reply_tokens=len(reply.token_ids),
        ttft_s=reply.ttft_s,
        latency_s=reply.total_s,
        num_evicted_tokens=reply.num_evicted_tokens,
        resident_tokens=reply.resident_tokens,
        blocks=reply.num_blocks,
        consolidated=reply.consolidated,
    )


def status_body(stats: SessionStats, **own: Any) -> StatusReply:  # noqa: ANN401 - pydantic checks them
    """Return the answer to a question for the status; ``own`` is what the frontend knows itself."""
    return StatusReply(
        reply_tokens=stats.num_reply_tokens,
        resident_tokens=stats.resident_tokens,
        blocks=stats.num_blocks,
        num_evictions=stats.num_evictions,
        num_evicted_tokens=stats.num_evicted_tokens,
        num_consolidations=stats.num_consolidations,
        num_parks=stats.num_parks,
        segments=[SegmentBody(kind=segment.kind, tokens=segment.num_tokens) for segment in stats.segments],
        **own,
    )

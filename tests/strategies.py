"""Hypothesis strategies for the core's values. They build valid ones only, and shrink to small ones."""

from __future__ import annotations

from attrs import frozen
from hypothesis import strategies as st

from kvpolicy.core.budget import RetentionBudget, SessionLimits
from kvpolicy.core.ledger import SessionLedger
from kvpolicy.core.parking import Pressure, WaitingHead
from kvpolicy.core.ranking import IdleSession
from kvpolicy.core.segments import Segment, SegmentKind, SegmentLog
from kvpolicy.core.spaces import TokenRange, blocks_for

block_sizes = st.sampled_from([1, 2, 4, 8, 16, 32])

media = st.sampled_from([(), ("image",)])


@st.composite
def token_ranges(draw: st.DrawFn, *, longest: int = 100) -> TokenRange:
    """Draw a range, empty ones included."""
    start = draw(st.integers(0, longest))
    return TokenRange(start, start + draw(st.integers(0, longest)))


@st.composite
def segment_logs(draw: st.DrawFn, *, most_segments: int = 8) -> SegmentLog:
    """Draw any log: gaps, pinned segments and media anywhere."""
    segments: list[Segment] = []
    end = 0
    for _ in range(draw(st.integers(0, most_segments))):
        start = end + draw(st.integers(0, 10))
        end = start + draw(st.integers(1, 40))
        segments.append(
            Segment(
                draw(st.sampled_from(SegmentKind)),
                start,
                end,
                pinned=draw(st.booleans()),
                media=draw(media),
            )
        )
    return SegmentLog(tuple(segments), end + draw(st.integers(0, 10)))


@frozen(kw_only=True)
class Setup:
    """A session that its engine admits."""

    budget: RetentionBudget
    limits: SessionLimits
    first_chunk: int
    max_tokens: int

    def opened(self) -> SessionLedger:
        """Return its ledger at the beginning."""
        return SessionLedger.opened(self.first_chunk, anchor_tokens=self.budget.anchor_tokens)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Draw an admitted session: a tight or a roomy budget, in an engine that is large enough or larger."""
    block_size = draw(st.sampled_from([1, 2, 4, 8, 16]))
    max_tokens = draw(st.integers(1, 20))
    first_chunk = draw(st.integers(1, 60))
    anchor_tokens = draw(st.none() | st.integers(1, 70))
    pinned = min(anchor_tokens or first_chunk, first_chunk)
    least = max(first_chunk + max_tokens, pinned + max_tokens + 2 * block_size + 1)
    total = least + draw(st.integers(0, 200))
    threshold = draw(st.sampled_from([0.5, 0.7, 1.0]))
    slack = st.integers(0, 300)
    return Setup(
        budget=RetentionBudget(
            content_segments=draw(st.integers(1, 8)),
            text_tokens=draw(st.none() | st.integers(1, total)),
            total_tokens=total,
            anchor_tokens=anchor_tokens,
            consolidation_threshold=threshold,
            min_total_tokens=1,
        ),
        limits=SessionLimits(
            block_size=block_size,
            context_limit=total + 1 + draw(slack),
            trained_range=int(total / threshold) + 1 + draw(slack),
            num_pool_blocks=blocks_for(total, block_size) + 1 + draw(slack),
        ),
        first_chunk=first_chunk,
        max_tokens=max_tokens,
    )


@st.composite
def idle_sessions(draw: st.DrawFn, *, most: int = 6) -> tuple[IdleSession, ...]:
    """Draw idle sessions with different request ids, some of them alike in everything else."""
    return tuple(
        IdleSession(
            f"session-{i}",
            priority=draw(st.integers(-1, 2)),
            idle_s=draw(st.sampled_from([0.0, 0.5, 60.0])),
            num_blocks=draw(st.integers(0, 5)),
            holds_slot=draw(st.booleans()),
        )
        for i in range(draw(st.integers(0, most)))
    )


@st.composite
def pressures(draw: st.DrawFn) -> Pressure:
    """Draw a scheduler's snapshot: from nothing waiting to more wanted than everybody holds."""
    lacking = draw(st.integers(0, 20))
    head = WaitingHead(
        "head",
        num_lacking_blocks=lacking,
        num_shared_blocks=draw(st.integers(0, lacking)),
        consolidates=draw(st.booleans()),
    )
    return Pressure(
        num_free_blocks=draw(st.integers(0, 8)),
        num_growth_blocks=draw(st.integers(0, 12)),
        has_free_slot=draw(st.booleans()),
        head=draw(st.sampled_from([head, None])),
        sessions=draw(idle_sessions()),
    )

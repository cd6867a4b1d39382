"""Events of all kinds, alone and several at once."""

from __future__ import annotations

from hypothesis import strategies as st

from kvpolicy.core.compaction import CompactionEvent
from kvpolicy.core.draws import BlockDraw, RingDraw, UniformDraw
from kvpolicy.core.philox import key_of
from kvpolicy.core.spaces import TokenRange, align_inward
from kvpolicy.kernels.expand.spec import HeadGrid

moving_draws = st.one_of(
    st.just(UniformDraw()),
    st.just(UniformDraw(is_shared=True)),
    st.builds(RingDraw, st.integers(0, 50) | st.integers(2**62, 2**70)),
)


@st.composite
def events(draw: st.DrawFn, *, widest: int = 40) -> CompactionEvent:
    """Draw any event: nothing dropped, everything dropped, no candidates, and whole blocks included."""
    prompt, width, protected = draw(st.integers(1, 20)), draw(st.integers(0, widest)), draw(st.integers(0, 20))
    kind = draw(moving_draws | st.builds(BlockDraw, st.sampled_from([1, 4])))
    num_dropped = draw(st.integers(0, width))
    if isinstance(kind, BlockDraw):
        blocks = align_inward(TokenRange(prompt, prompt + width), kind.block_size)
        num_dropped = draw(st.integers(0, blocks.num_blocks)) * kind.block_size
    return CompactionEvent(
        key=key_of(draw(st.integers(0, 3)), draw(st.sampled_from(["a", "b"]))),
        ordinal=draw(st.integers(0, 5) | st.just(2**32 - 1)),
        prompt_length=prompt,
        physical_length=prompt + width + protected,
        num_dropped=num_dropped,
        num_protected=protected,
        draw=kind,
    )


def lists_of_events(*, widest: int = 40) -> st.SearchStrategy[list[CompactionEvent]]:
    """Draw the events of one step, none included."""
    return st.lists(events(widest=widest), max_size=5)


@st.composite
def grids(draw: st.DrawFn) -> HeadGrid:
    """Draw a part of a model."""
    return HeadGrid(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        first_layer=draw(st.integers(0, 40)),
        first_kv_head=draw(st.integers(0, 7)),
    )

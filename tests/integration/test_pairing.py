"""The pairing soak: over thousands of chunks on the real AsyncLLM, reply k is the one that chunk k calls for.

The model says the tokens that follow the last token of its chunk, so a reply names its chunk by its tokens and its
length. Everything that could bring replies out of step happens at once: several streams and ordinary requests, a pool
too small for all of them, chunks that pile up in front of the engine, replies that pile up in front of the consumer,
chunks that are refused, evictions, consolidations, parking and forced preemptions.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define, field, frozen
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams

from kvpolicy.adapters.vllm import AsyncLLM
from kvpolicy.adapters.vllm.v0_28.frontend.boundary_collector import MAX_OPEN_CHUNKS
from tests.integration.live import engine_options, exact, num_missing_blocks, ordinary
from tests.models import SPECIAL_TOKENS, VOCAB_SIZE, echo_llama, successor

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

    from vllm.outputs import RequestOutput

# The four windows, of 17 blocks at most, and the ordinary requests do not fit in at once.
NUM_BLOCKS = 60
# 0.7 x 512 trained positions: with 256 resident tokens, each hundred tokens or so bring a consolidation.
TRAINED_RANGE = 512
RETENTIONS: tuple[dict[str, Any], ...] = (
    {"total_tokens": 256, "min_total_tokens": 64},
    {"total_tokens": 208, "min_total_tokens": 64, "anchor_tokens": 4},
    {"total_tokens": 256, "min_total_tokens": 64, "content_segments": 5},
    {"total_tokens": 256, "min_total_tokens": 64, "text_tokens": 120},
)
FIRST_TOKEN = len(SPECIAL_TOKENS)
NUM_TOKENS = VOCAB_SIZE - FIRST_TOKEN
MAX_REPLY = 9
NUM_CHUNKS = 500
TIME_LIMIT_S = 500.0


@frozen
class Chunk:
    """One chunk of a stream, and what it calls for."""

    tokens: tuple[int, ...]
    max_tokens: int
    is_refused: bool

    @property
    def reply(self) -> list[int]:
        """The tokens of its reply: none where the chunk is longer than the session's budget."""
        return [] if self.is_refused else follow(self.tokens[-1], self.max_tokens)


def follow(token: int, num_tokens: int) -> list[int]:
    said = []
    for _ in range(num_tokens):
        token = successor(token)
        said.append(token)
    return said


def make_chunks(source: random.Random, num_chunks: int) -> list[Chunk]:
    """Return chunks of random lengths whose last tokens are all different for 316 chunks in a row."""
    offset, chunks = source.randrange(NUM_TOKENS), []
    for i in range(num_chunks):
        # Not the first: a session whose first chunk does not fit is not admitted.
        is_refused = i > 0 and source.random() < 0.05
        num_tokens = 300 if is_refused else source.randint(1, 30)
        tokens = [source.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(num_tokens - 1)]
        last = FIRST_TOKEN + (offset + 37 * i) % NUM_TOKENS  # 37 and 316 have no common factor
        chunks.append(Chunk((*tokens, last), source.randint(1, MAX_REPLY), is_refused))
    return chunks


@define
class Stream:
    """A low-level stream with a producer and a consumer that both take their time at random."""

    name: str
    chunks: list[Chunk]
    retention: dict[str, Any]
    source: random.Random
    # A source of the consumer's own: how often it is late does not hang on how the two take turns.
    late: random.Random
    num_taken: int = 0
    num_held_up: int = 0
    num_replies: int = 0
    report: dict[str, Any] = field(factory=dict)

    async def produce(self) -> AsyncGenerator[StreamingInput, None]:
        """Yield the chunks in bursts of 2 to 16, none of which waits for a reply.

        A refused chunk begins a burst: the session is often idle then, and the next chunk comes in the same moment.
        """
        burst = 0
        for chunk in self.chunks:
            if burst == 0 or chunk.is_refused:
                burst = self.source.randint(2, 16)
                # Long enough, about half the time, that the session is idle and consolidates ahead of time.
                await asyncio.sleep(self.source.uniform(0.0, 0.4))
            burst -= 1
            self.num_taken += 1
            yield StreamingInput(
                prompt=TokensPrompt(prompt_token_ids=list(chunk.tokens)), sampling_params=exact(chunk.max_tokens)
            )

    def params(self) -> SamplingParams:
        extra = {"streaming_retention": self.retention}
        return exact(MAX_REPLY, extra_args=extra, output_kind=RequestOutputKind.DELTA)

    async def consume(self, engine: AsyncLLM) -> None:
        """Read the replies, mostly at once, sometimes late, now and then so late that many are waiting."""
        said: list[int] = []
        async for output in engine.generate(self.produce(), self.params(), self.name):
            said += output.outputs[0].token_ids
            if output.outputs[0].finish_reason is None:
                continue
            self.end_reply(output, said)
            said = []
            draw = self.late.random()
            if draw < 0.02:
                await self.wait_long(engine, self.late.uniform(0.0, 0.2))
            elif draw < 0.2:
                await asyncio.sleep(self.late.choice([0.0, 0.001, 0.01, 0.05]))
        assert not said

    def end_reply(self, output: RequestOutput, said: list[int]) -> None:
        """Check a reply's tokens and its place at once, so that a failure shows where it began."""
        where = f"{self.name}: reply {self.num_replies} of {len(self.chunks)}"
        chunk, self.report = self.chunks[self.num_replies], output.kv_transfer_params["kvpolicy"]
        assert said == chunk.reply, where
        assert self.report["chunk"] == self.num_replies, where
        assert self.report["code"] == ("chunk_too_long" if chunk.is_refused else None), where
        assert self.report["resident_tokens"] <= self.retention["total_tokens"], where
        self.num_replies += 1

    def summary(self) -> str:
        names = ("num_evictions", "num_consolidations", "num_parks")
        counts = ", ".join(f"{name} {self.report['counts'][name]}" for name in names)
        return f"{self.name}: {self.num_taken} taken, {self.num_replies} replies, held up {self.num_held_up}; {counts}"

    async def wait_long(self, engine: AsyncLLM, further_s: float) -> None:
        """Read nothing until as many replies wait as may, and a while longer: no further chunk may be taken then."""
        live = (stream.replies for stream in engine._streams.values())
        queue = next((queue for queue in live if queue.request_id.startswith(f"{self.name}-")), None)
        while queue is not None and queue._num_boundaries - queue._num_read < MAX_OPEN_CHUNKS:
            await asyncio.sleep(0.002)
            if self.num_taken == len(self.chunks):
                return  # so many may never come
        taken = self.num_taken
        await asyncio.sleep(further_s)
        # One chunk may have been on its way through the producer.
        assert self.num_taken <= taken + 1, f"{self.name}: chunks are taken while {MAX_OPEN_CHUNKS} replies wait"
        self.num_held_up += 1


@define
class Company:
    """What goes on beside the streams, until it is told to stop."""

    engine: AsyncLLM
    source: random.Random
    num_answers: int = 0
    num_resets: int = 0

    async def ask(self) -> None:
        while True:
            tokens = [self.source.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(self.source.randint(1, 100))]
            num_tokens = self.source.randint(1, 30)
            assert await ordinary(self.engine, tokens, num_tokens) == follow(tokens[-1], num_tokens)
            self.num_answers += 1
            await asyncio.sleep(self.source.uniform(0.0, 0.1))

    async def preempt(self) -> None:
        while True:
            await asyncio.sleep(self.source.uniform(0.0, 0.4))
            await self.engine.reset_prefix_cache(reset_running_requests=True)
            self.num_resets += 1


@pytest.fixture(scope="module")
def engine(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    model: Path = echo_llama(tmp_path_factory.mktemp("models") / "echo", max_position_embeddings=TRAINED_RANGE)

    async def start() -> AsyncLLM:
        return AsyncLLM(**engine_options(model, num_gpu_blocks_override=NUM_BLOCKS))

    engine = runner.run(start())
    yield engine
    engine.shutdown()


async def soak(engine: AsyncLLM, streams: list[Stream], company: Company) -> None:
    """Run the streams to their ends; the first failure of anything ends it all."""
    async with asyncio.timeout(TIME_LIMIT_S), asyncio.TaskGroup() as group:
        beside = [group.create_task(company.ask()), group.create_task(company.preempt())]
        await asyncio.gather(*(group.create_task(stream.consume(engine)) for stream in streams))
        for task in beside:
            task.cancel()


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.long, id=f"long-{seed}") for seed in range(2, 12))]
)
def test_reply_k_belongs_to_chunk_k(engine: AsyncLLM, runner: asyncio.Runner, seed: int) -> None:
    print(f"seed {seed}")
    source = random.Random(seed)
    streams = [
        Stream(
            f"stream-{seed}-{i}",
            make_chunks(source, NUM_CHUNKS),
            retention,
            random.Random(source.random()),
            random.Random(source.random()),
        )
        for i, retention in enumerate(RETENTIONS)
    ]
    company = Company(engine, random.Random(source.random()))
    try:
        runner.run(soak(engine, streams, company))
    finally:
        for stream in streams:
            print(stream.summary())
        print(f"{company.num_answers} ordinary requests, {company.num_resets} resets")
    for stream in streams:
        assert stream.num_taken == stream.num_replies == len(stream.chunks)
        assert stream.report["counts"]["num_evictions"] > 10
        assert stream.num_held_up > 1
    for name in ("num_consolidations", "num_parks"):
        assert sum(stream.report["counts"][name] for stream in streams) > 5, name
    assert min(company.num_answers, company.num_resets) > 5
    assert not engine.output_processor.request_states
    assert runner.run(num_missing_blocks(engine)) == 0

"""Both engines behind the same ``push``: vLLM's own, and ours.

Nothing of kvpolicy is in the stock engine: no scheduler, worker, output processor or parameter of ours. Only
the turns are cut by the same encoder, so that both engines are fed the same tokens.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM as StockAsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from kvpolicy.adapters.vllm import AsyncLLM
from kvpolicy.adapters.vllm.shared.turns import TurnEncoder
from kvpolicy.adapters.vllm.v0_28.frontend.chat import ChatFormat
from kvpolicy.adapters.vllm.v0_28.startup.position_limit import position_limit
from kvpolicy.core.errors import SessionFailedError
from kvpolicy.core.replies import Reply
from kvpolicy.core.spaces import blocks_for

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from vllm.outputs import RequestOutput

    from kvpolicy.adapters.vllm import Session

ENGINE_DEAD = EngineDeadError


class StockSession:
    """One streaming-input request of the stock engine, with the ``push`` of a bounded session."""

    def __init__(self, engine: StockAsyncLLM, *, system_prompt: str, params: SamplingParams) -> None:
        """Prepare the request; the engine hears of it with the first push."""
        self._encoder = TurnEncoder(engine.get_tokenizer(), ChatFormat().renderer(engine.renderer), system_prompt)
        self._block_size = int(engine.vllm_config.cache_config.block_size)
        self._params = copy(params)
        self._params.output_kind = RequestOutputKind.DELTA
        self._inputs: asyncio.Queue[StreamingInput | None] = asyncio.Queue()
        self._outputs: AsyncGenerator[RequestOutput, None] = engine.generate(
            self._feed(), self._params, request_id=f"stock-{uuid.uuid4().hex}"
        )
        self._num_resident = 0
        self._num_chunks = 0

    async def push(self, turn: str, *, seed: int) -> Reply:
        """Feed one chunk and return its reply.

        Where sampling is random, the stock engine goes on with the random numbers of the first chunk's seed,
        whatever later chunks ask for. Resident tokens are computed: all that was fed and said, without the last
        token of each reply, which the engine samples but never puts into the cache.

        Raises:
            SessionFailedError: the engine ended the request.
            EngineDeadError: the engine process has ended.
        """
        tokens = self._encoder.encode(turn)
        started_s = time.perf_counter()
        await self._inputs.put(
            StreamingInput(prompt=TokensPrompt(prompt_token_ids=tokens), sampling_params=_with_seed(self._params, seed))
        )
        first_s, text, token_ids, completion = None, "", [], None
        async for output in self._outputs:
            first_s = first_s or time.perf_counter()
            completion = output.outputs[0]
            text += completion.text
            token_ids += completion.token_ids
            if completion.finish_reason is not None:
                break
        if completion is None or completion.finish_reason is None:
            raise SessionFailedError("engine", "the stock engine ended the stream without a reply")
        self._encoder.sent()
        ended_s = time.perf_counter()
        self._num_resident += len(tokens) + max(0, len(token_ids) - 1)
        self._num_chunks += 1
        return Reply(
            chunk=self._num_chunks - 1,
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            ttft_s=(first_s or ended_s) - started_s,
            total_s=ended_s - started_s,
            num_chunk_tokens=len(tokens),
            num_evicted_tokens=0,
            resident_tokens=self._num_resident,
            num_blocks=blocks_for(self._num_resident, self._block_size),
            consolidated=False,
        )

    async def close(self) -> None:
        """End the input; the engine lets go of the request on its own."""
        await self._inputs.put(None)
        await self._outputs.aclose()

    def next_position(self) -> int:
        """Return the position of the next token: nothing is ever evicted, so all positions are in use."""
        return self._num_resident

    async def _feed(self) -> AsyncGenerator[StreamingInput, None]:
        while (chunk := await self._inputs.get()) is not None:
            yield chunk


class BoundedSession:
    """Our session with the same three methods as ``StockSession``."""

    def __init__(self, session: Session, params: SamplingParams) -> None:
        """Wrap a session."""
        self._session = session
        self._params = params

    async def push(self, turn: str, *, seed: int) -> Reply:
        """Feed one chunk and return its reply."""
        return await self._session.push(turn, sampling_params=_with_seed(self._params, seed))

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    def next_position(self) -> int:
        """Return the position of the next token, as the engine last reported it."""
        return self._session.stats().next_position


def start_engine(arguments: Mapping[str, Any], *, stock: bool) -> StockAsyncLLM:
    """Return a started engine: vLLM's own or ours (which is one of vLLM's, too)."""
    if not stock:
        return AsyncLLM(**arguments)
    from vllm.engine.arg_utils import AsyncEngineArgs

    return StockAsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def open_session(
    engine: StockAsyncLLM,
    *,
    system_prompt: str,
    retention: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> StockSession | BoundedSession:
    """Return a session; retention is for ours alone, sampling are arguments of vLLM's ``SamplingParams``."""
    params = SamplingParams(**sampling)
    if not isinstance(engine, AsyncLLM):
        return StockSession(engine, system_prompt=system_prompt, params=params)
    session = engine.open_session(system_prompt=system_prompt, retention=retention, sampling_params=params)
    return BoundedSession(session, params)


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    seeded = copy(params)
    # Greedy sampling has no use for one, and a generator per request costs time.
    seeded.seed = seed if params.temperature > 0 else None
    return seeded


def facts(engine: StockAsyncLLM) -> dict[str, Any]:
    """Return what a report must say of the engine."""
    config = engine.vllm_config
    return {
        "vllm": str(vllm_version),
        "trained_range": position_limit(config),
        "block_size": int(config.cache_config.block_size),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
    }

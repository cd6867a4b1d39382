"""A request's per-token arrays: the one module that edits them, as private state of vLLM's requests.

Every name used is listed in ``surface.py``. Nothing here decides anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import StreamingUpdate

from kvpolicy.core.errors import InvariantError

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpolicy.core.spaces import TokenRange


def require_settled(request: Request) -> None:
    """Refuse to edit a request that a step in flight may still read or write (R.3)."""
    if request.num_in_flight_tokens:
        message = (
            f"request {request.request_id}: expected no tokens in flight before its blocks or tokens are edited, "
            f"got {request.num_in_flight_tokens}"
        )
        raise InvariantError(message)


def make_private(request: Request, salt: str) -> None:
    """Give a request its own prefix-cache salt and hash its blocks anew under it."""
    request.cache_salt = salt
    _rehash(request, 0)


def chunk_of(message: Request) -> StreamingUpdate | None:
    """Return a session's message as a chunk that keeps its grammar; None for an end of input."""
    update = StreamingUpdate.from_request(message)
    if update is not None:
        update.structured_output_request = message.structured_output_request
    return update


def drop_tail(request: Request, keep: int, block_size: int) -> None:
    """Cut a request's tokens to the first ``keep``; its reply becomes part of its prompt, and its grammar is over.

    The dropped token may have completed a block whose hash is already in the chain: hashes are cut with it.
    """
    require_settled(request)
    request.structured_output_request = None
    del request._all_token_ids[keep:]
    _seal(request)
    _rehash(request, keep // block_size)


def cut_range(request: Request, freed: TokenRange, block_size: int) -> None:
    """Remove one block-aligned token range from every per-token array of a request."""
    require_settled(request)
    del request._all_token_ids[freed.start : freed.end]
    if request.num_computed_tokens:
        request.num_computed_tokens -= freed.width
    _seal(request)
    _rehash(request, freed.start // block_size)


def append_chunk(request: Request, update: StreamingUpdate) -> None:
    """Append a chunk's tokens and take over the chunk's own parameters.

    Unlike the stock fold it refreshes ``max_tokens`` and the grammar, clears the stop reason and starts new prefill
    statistics.
    """
    require_settled(request)
    request._all_token_ids.extend(update.prompt_token_ids or ())
    _seal(request)
    request.update_block_hashes()
    request.sampling_params = update.sampling_params
    request.max_tokens = update.max_tokens
    request.structured_output_request = update.structured_output_request
    request.arrival_time = update.arrival_time
    request.stop_reason = None
    # Statistics of a prefill are kept for the first try only: that count, too, begins anew with a chunk.
    request.num_preemptions = 0
    stats = PrefillStats()
    stats.set(
        num_prompt_tokens=request.num_prompt_tokens,
        num_local_cached_tokens=request.num_computed_tokens,
        num_external_cached_tokens=0,
    )
    request.prefill_stats = stats


def _seal(request: Request) -> None:
    """Make all tokens of a request its prompt.

    A new list for the prompt: workers in the same process may hold the old one. ``_all_token_ids`` is edited in place
    because the request's read-only view is bound to that list object.
    """
    request._output_token_ids.clear()
    request.prompt_token_ids = list(request._all_token_ids)
    request.num_prompt_tokens = len(request.prompt_token_ids)


def _rehash(request: Request, first_block: int) -> None:
    """Recompute the block hashes from ``first_block`` on."""
    del request.block_hashes[first_block:]
    request.update_block_hashes()

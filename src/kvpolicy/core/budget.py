"""How much a session may keep, and whether an engine can serve that."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

from attrs import asdict, evolve, frozen

from kvpolicy.core.advice import fitting_advice
from kvpolicy.core.checks import from_mapping, integer_errors, is_at_least, is_number, reject
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.core.spaces import blocks_for

if TYPE_CHECKING:
    from collections.abc import Mapping

# What a session may hold where nobody asked for a total (requirement R.15), if model and engine allow it.
_DEFAULT_TOTAL_TOKENS = 7000
_PIN_LESS = "pin at most {} tokens (a shorter first chunk, or retention.anchor_tokens)"


@frozen(kw_only=True)
class SessionLimits:
    """What an engine offers to sessions, in tokens and blocks.

    ``context_limit`` is the longest sequence the engine takes, ``trained_range`` the number of positions that
    the model's rotary tables have rows for there, ``num_pool_blocks`` what all requests share.
    """

    block_size: int
    context_limit: int
    trained_range: int
    num_pool_blocks: int

    def __attrs_post_init__(self) -> None:
        reject(error for name, value in asdict(self).items() for error in integer_errors(f"limits.{name}", value, 1))


@frozen(kw_only=True)
class RetentionBudget:
    """What a session keeps. Every violation is reported at once.

    Attributes:
        content_segments: content segments kept, the newest included.
        text_tokens: tokens kept in segments without media; None: no limit of their own.
        total_tokens: tokens kept in all, the next reply included; None: see ``resolved``.
        anchor_tokens: tokens of the first chunk that are pinned (attention sinks); None: the whole first
            chunk.
        consolidation_threshold: share of the model's trained positions that a session may reach before its
            window is computed again from position 0.
        min_total_tokens: what ``total_tokens`` may not be below.
    """

    content_segments: int = 30
    text_tokens: int | None = None
    total_tokens: int | None = None
    anchor_tokens: int | None = None
    consolidation_threshold: float = 0.7
    min_total_tokens: int = 1024

    def __attrs_post_init__(self) -> None:
        reject(_violations(self))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Return the budget that a mapping (a JSON object, say) describes; what is left out has its default.

        Raises:
            PolicyUsageError: unknown keys, wrong types and impossible values, all at once.
        """
        return from_mapping(cls, mapping, name="retention")

    def to_mapping(self) -> dict[str, Any]:
        """Return the budget as a JSON-able mapping that ``from_mapping`` reads back."""
        return asdict(self)

    def resolved(self, limits: SessionLimits, max_tokens: int | None) -> Self:
        """Return the budget with ``total_tokens`` set (itself, if it is).

        The default is 7000, or less where the model or the engine is small: the threshold's share of the
        trained range and of the context limit, less a reply and two blocks. With a trained range of 4096 and
        a larger context limit, a threshold of 0.7, replies of 24 tokens and blocks of 16: floor(2867.2) - 24
        - 32 = 2811.

        Raises:
            PolicyUsageError: ``max_tokens`` is not finite, or the result is below the minimum or the text
                budget.
        """
        if self.total_tokens is not None:
            return self
        if not is_at_least(max_tokens, 1):
            raise PolicyUsageError(_reply_error(max_tokens))
        reserve = max_tokens + 2 * limits.block_size
        by_range = math.floor(self.position_limit(limits)) - reserve
        by_context = math.floor(self.consolidation_threshold * limits.context_limit) - reserve
        total = min(_DEFAULT_TOTAL_TOKENS, by_range, by_context)
        if total < self.min_total_tokens:
            raise PolicyUsageError(
                f"retention.total_tokens: its default would be {total} ({by_range} by the trained range "
                f"{limits.trained_range}, {by_context} by the context limit {limits.context_limit}), "
                f"expected at least {self.min_total_tokens} (min_total_tokens); lower max_tokens "
                f"{max_tokens} or min_total_tokens, or raise the context limit"
            )
        return evolve(self, total_tokens=total)

    def position_limit(self, limits: SessionLimits) -> float:
        """Return the position that a session must not pass without being consolidated."""
        return self.consolidation_threshold * limits.trained_range

    def require_total(self) -> int:
        """Return ``total_tokens``.

        Raises:
            PolicyUsageError: it is not set.
        """
        if self.total_tokens is None:
            raise PolicyUsageError("retention.total_tokens: expected an integer, got None; call resolved() first")
        return self.total_tokens


def _violations(budget: RetentionBudget) -> list[str]:
    """Return everything that is wrong with a budget in itself."""
    text, total, least = budget.text_tokens, budget.total_tokens, budget.min_total_tokens
    has_least = is_at_least(least, 1)
    reasons = [
        *integer_errors("retention.content_segments", budget.content_segments, 1),
        *integer_errors("retention.text_tokens", text, 1, optional=True),
        *integer_errors(
            "retention.total_tokens",
            total,
            least if has_least else 1,
            because="min_total_tokens" if has_least else "",
            optional=True,
        ),
        *integer_errors("retention.anchor_tokens", budget.anchor_tokens, 1, optional=True),
        *integer_errors("retention.min_total_tokens", least, 1),
    ]
    threshold = budget.consolidation_threshold
    # A NaN fails the comparison, too.
    if not is_number(threshold) or not 0 < threshold <= 1:
        reasons.append(f"retention.consolidation_threshold: expected a number above 0 and up to 1, got {threshold!r}")
    if is_at_least(text, 1) and is_at_least(total, 1) and text > total:
        reasons.append(f"retention.text_tokens: expected at most {total} (total_tokens), got {text}")
    return reasons


def _reply_error(max_tokens: object) -> str:
    return f"max_tokens: a session needs a finite max_tokens, an integer >= 1, got {max_tokens!r}"


def admission_errors(
    budget: RetentionBudget, limits: SessionLimits, *, first_chunk_tokens: int, max_tokens: int | None
) -> tuple[str, ...]:
    """Return every reason why a session with this (resolved) budget cannot be served; empty if it can.

    Raises:
        PolicyUsageError: the budget is not resolved.
    """
    total = budget.require_total()
    reasons = _limit_errors(budget, limits, total)
    reasons += integer_errors("first chunk", first_chunk_tokens, 1)
    if not is_at_least(max_tokens, 1):
        return (*reasons, _reply_error(max_tokens))
    pinned = min(budget.anchor_tokens or first_chunk_tokens, first_chunk_tokens)
    reserve = 2 * limits.block_size
    # Where all of the chunk is pinned, the next reason says the same and more.
    if pinned < first_chunk_tokens and first_chunk_tokens + max_tokens > total:
        reasons.append(
            f"first chunk: {first_chunk_tokens} tokens and a reply of max_tokens {max_tokens} do not fit "
            f"into retention.total_tokens {total}; "
            + fitting_advice(total, num_tokens=first_chunk_tokens, max_tokens=max_tokens)
        )
    if pinned + max_tokens + reserve >= total:
        reasons.append(
            f"anchor: {pinned} pinned tokens, a reply of max_tokens {max_tokens} and {reserve} for "
            f"two blocks leave no room for another chunk in retention.total_tokens {total}; "
            + fitting_advice(total - reserve - 1, num_tokens=pinned, max_tokens=max_tokens, shorter=_PIN_LESS)
        )
    return tuple(reasons)


def _limit_errors(budget: RetentionBudget, limits: SessionLimits, total: int) -> list[str]:
    """Return why an engine with these limits can hold no session of ``total`` tokens."""
    reasons = []
    if total + 1 > limits.context_limit:
        reasons.append(
            f"retention.total_tokens: expected less than the context limit {limits.context_limit}, got {total}; "
            "lower the budget or raise the context limit"
        )
    if total >= budget.position_limit(limits):
        reasons.append(
            f"retention.total_tokens: expected less than {budget.consolidation_threshold} "
            f"(consolidation_threshold) x {limits.trained_range} (trained range), got {total}; "
            "lower the budget or raise the threshold"
        )
    num_blocks = most_blocks(budget, limits)
    if num_blocks > limits.num_pool_blocks:
        reasons.append(
            f"retention.total_tokens: {total} tokens need {num_blocks} blocks of {limits.block_size}, the "
            f"engine has {limits.num_pool_blocks}; lower the budget or give the engine more cache"
        )
    return reasons


def most_blocks(budget: RetentionBudget | None, limits: SessionLimits) -> int:
    """Return the most blocks that a session can ever hold: of its (resolved) budget, or of the context limit.

    >>> limits = SessionLimits(block_size=16, context_limit=2048, trained_range=2048, num_pool_blocks=200)
    >>> most_blocks(RetentionBudget(total_tokens=1030), limits), most_blocks(None, limits)
    (66, 128)

    Raises:
        PolicyUsageError: the budget is not resolved.
    """
    if budget is None:
        return blocks_for(limits.context_limit, limits.block_size)
    # One more than the tokens fill: an eviction cuts at whole blocks only.
    return blocks_for(budget.require_total(), limits.block_size) + 1

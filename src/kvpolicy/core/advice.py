"""What to do about a chunk that does not fit: only what would help."""

from __future__ import annotations

SHORTER_CHUNK = "send a chunk of at most {} tokens"
LARGER_BUDGET = "open a session with a larger retention.total_tokens"


def fitting_advice(
    room: int, *, num_tokens: int, max_tokens: int, shorter: str = SHORTER_CHUNK, otherwise: str = LARGER_BUDGET
) -> str:
    """Return what would make a chunk and the longest reply to it fit into ``room`` tokens. Each part helps by itself.

    >>> fitting_advice(50, num_tokens=40, max_tokens=24)
    'send a chunk of at most 26 tokens, lower max_tokens to 10 or open a session with a larger retention.total_tokens'
    >>> fitting_advice(20, num_tokens=10, max_tokens=24)
    'lower max_tokens to 10 or open a session with a larger retention.total_tokens'
    >>> fitting_advice(20, num_tokens=40, max_tokens=24, otherwise="give up")
    'send a shorter chunk with a lower max_tokens (20 tokens together) or give up'
    >>> fitting_advice(1, num_tokens=40, max_tokens=24, otherwise="give up")
    'give up'
    """
    parts = []
    if room > max_tokens:
        parts.append(shorter.format(room - max_tokens))
    if room > num_tokens:
        parts.append(f"lower max_tokens to {room - num_tokens}")
    # One token of each is the least.
    if not parts and room > 1:
        parts.append(f"send a shorter chunk with a lower max_tokens ({room} tokens together)")
    return " or ".join(filter(None, (", ".join(parts), otherwise)))

"""Block tables as a dict of lists."""

from __future__ import annotations

from kvpolicy.core.spaces import BlockId, TokenRange, align_inward, blocks_for


class FakeBlockTable:
    """Satisfies ``kvpolicy.core.ports.BlockTable``. Requests enter it with ``allocate``."""

    def __init__(self, *, block_size: int = 16, num_pool_blocks: int = 64) -> None:
        self.block_size = block_size
        self.tables: dict[str, list[BlockId]] = {}
        self.free = [BlockId(i) for i in range(num_pool_blocks)]
        self.num_users = dict.fromkeys(self.free, 0)

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Give a request the blocks that it lacks to hold ``num_tokens``."""
        table = self.tables.setdefault(request_id, [])
        while len(table) < blocks_for(num_tokens, self.block_size):
            block = self.free.pop(0)
            self.num_users[block] += 1
            table.append(block)

    def share(self, request_id: str, other_id: str, num_blocks: int) -> None:
        """Let a new request begin with the first blocks of another one."""
        shared = self.tables[other_id][:num_blocks]
        self.tables[request_id] = list(shared)
        for block in shared:
            self.num_users[block] += 1

    def evict_token_range(self, request_id: str, start: int, end: int) -> tuple[int, int, int]:
        """Evict the whole blocks inside the range, as the port says."""
        table = self.tables.get(request_id, [])
        stop = min(end, len(table) * self.block_size)
        if start < 0 or stop <= start:
            return start, start, 0
        span = align_inward(TokenRange(start, stop), self.block_size)
        if span.is_empty:
            return start, start, 0
        evicted = table[span.first : span.last]
        del table[span.first : span.last]
        for block in evicted:
            self.num_users[block] -= 1
        reclaimed = [block for block in evicted if self.num_users[block] == 0]
        self.free += reclaimed
        return span.tokens.start, span.tokens.end, len(reclaimed)

    def num_blocks(self, request_id: str) -> int:
        """Return the blocks in a request's table."""
        return len(self.tables.get(request_id, ()))

    def num_free_blocks(self) -> int:
        """Return the blocks that can be allocated."""
        return len(self.free)

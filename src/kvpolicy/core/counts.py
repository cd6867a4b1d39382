"""What keeping a session bounded has done to it, in numbers: one value, from the ledger to whoever asks."""

from __future__ import annotations

from attrs import evolve, fields_dict, frozen

from kvpolicy.core.checks import integer_errors, reject


@frozen(kw_only=True)
class SessionCounts:
    """How often a session was cut, computed anew and parked, and how many tokens have left it.

    The ledger counts over the session's life. Reports, statistics, answers over HTTP and the client carry these
    numbers under the same names.

    Attributes:
        num_evictions: ranges evicted.
        num_evicted_tokens: tokens in them.
        num_consolidations: how often the window was set to be computed anew from position 0.
        num_parks: how often its blocks were given back while it was at rest.
    """

    num_evictions: int = 0
    num_evicted_tokens: int = 0
    num_consolidations: int = 0
    num_parks: int = 0

    def __attrs_post_init__(self) -> None:
        for name in fields_dict(SessionCounts):
            reject(integer_errors(f"counts.{name}", getattr(self, name), 0))

    def with_eviction(self, num_tokens: int) -> SessionCounts:
        """Return the counts with one more eviction, of ``num_tokens`` tokens."""
        return evolve(
            self, num_evictions=self.num_evictions + 1, num_evicted_tokens=self.num_evicted_tokens + num_tokens
        )

    def with_consolidation(self) -> SessionCounts:
        """Return the counts with one more consolidation."""
        return evolve(self, num_consolidations=self.num_consolidations + 1)

    def with_park(self) -> SessionCounts:
        """Return the counts with one more parking."""
        return evolve(self, num_parks=self.num_parks + 1)

    def since(self, earlier: SessionCounts) -> SessionCounts:
        """Return what was counted after ``earlier``, which are counts of the same session.

        >>> SessionCounts(num_evictions=3, num_evicted_tokens=96).since(
        ...     SessionCounts(num_evictions=1, num_evicted_tokens=32)
        ... )
        SessionCounts(num_evictions=2, num_evicted_tokens=64, num_consolidations=0, num_parks=0)

        Raises:
            PolicyUsageError: ``earlier`` counts more of something.
        """
        return SessionCounts(
            **{name: getattr(self, name) - getattr(earlier, name) for name in fields_dict(SessionCounts)}
        )

"""How far a compacted request is, as the front end knows it between the engine's reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import asdict, define, field

from kvpolicy.adapters.vllm.shared.messages import INTERNAL_KEY, CompactionResult

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput


@define
class RequestProgress:
    """One request. The engine reports after each event and at the end; the tokens are counted here."""

    prompt_length: int
    bound: int
    num_tokens: int = 0
    _result: dict[str, Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._result = asdict(
            CompactionResult(
                num_events=0,
                num_dropped=0,
                logical_length=self.prompt_length,
                physical_length=self.prompt_length,
                bound=self.bound,
                num_blocks_returned=0,
            )
        )

    def with_output(self, output: EngineCoreOutput) -> dict[str, Any]:
        """Return what an output is to say of its request, and count its tokens."""
        self.num_tokens += len(output.new_token_ids)
        reported = (output.kv_transfer_params or {}).get(INTERNAL_KEY)
        if reported is not None:
            self._result = reported
            if output.finish_reason is not None:
                return {INTERNAL_KEY: reported}
        # The newest token is not stored yet.
        stored = self.prompt_length + max(self.num_tokens - 1, 0)
        lengths = {"logical_length": stored, "physical_length": stored - self._result["num_dropped"]}
        return {INTERNAL_KEY: {**self._result, **lengths}}

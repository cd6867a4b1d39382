"""Text turns as token ids: the model's chat template, cut into the part that each chunk adds. Knows no engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from attrs import define, field

from kvpolicy.adapters.vllm.shared.chat_template import WAY_OUT, made_up_reply, template_errors
from kvpolicy.core.checks import reject, text_errors
from kvpolicy.core.errors import ChunkRefusedError, PolicyUsageError

if TYPE_CHECKING:
    from kvpolicy.adapters.vllm.shared.chat_template import Render

# Characters from which on a turn is encoded in a thread: the loop would stand still for several milliseconds.
_LONG_TURN = 4_000
NO_TOKENIZER = "the engine has no tokenizer (skip_tokenizer_init)"


def system_prompt_errors(system_prompt: str | None, tokenizer: object | None) -> tuple[str, ...]:
    """Return why there can be no such system prompt; empty if there can be."""
    if system_prompt is None:
        return ()
    reasons = list(text_errors("system_prompt", system_prompt))
    if system_prompt and tokenizer is None:
        reasons.append(f"system_prompt: {NO_TOKENIZER}; put its tokens into the first chunk")
    return tuple(reasons)


@define
class TurnEncoder:
    """Turns text into the tokens of a chunk.

    With a chat template (``render``), the first turn is system prompt + user turn + the opening of a reply, and each
    later turn is the closing of the reply before it + user turn + opening. The token that ended a reply was never
    computed, so the closing belongs to the next chunk, with that token if the template writes it; it is the same where
    a reply was cut at its longest. A template that cannot be cut so is refused when the encoder is made (see
    ``chat_template.template_errors``). Without one, the text is used as it is.

    A text of more than ``max_chars`` characters is not even looked at. An engine without a tokenizer (None) takes none.

    Raises:
        PolicyUsageError: the template cannot be cut into turns, or it raises for this system prompt.
    """

    tokenizer: Any
    render: Render | None = None
    system_prompt: str | None = None
    max_chars: int | None = None
    _num_turns: int = field(default=0, init=False)
    # Stands for the reply while the template is rendered; the text behind it is what the next turn adds.
    _reply: str = field(factory=made_up_reply, init=False)

    def __attrs_post_init__(self) -> None:
        if self.render is None:
            return
        reject(template_errors(self.render, has_system=bool(self.system_prompt)))
        if self.system_prompt and not self._is_too_long("-"):
            self._rendered("-", self.render)

    async def encode_aside(self, text: str) -> list[int]:
        """Return what ``encode`` returns; a long text is encoded in a thread while the loop goes on.

        Raises:
            ChunkRefusedError: as ``encode``.
            PolicyUsageError: as ``encode``.
        """
        # What is too long is refused at once: no thread is needed for that.
        is_long = self._num_chars(text) > _LONG_TURN and not self._is_too_long(text)
        return await asyncio.to_thread(self.encode, text) if is_long else self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Return the tokens that this turn adds to the session.

        Raises:
            ChunkRefusedError: it is longer than any text that fits.
            PolicyUsageError: the turn has no tokens, is no text that UTF-8 can encode, or the chat template raises for
                it; or the engine has no tokenizer.
        """
        if self.tokenizer is None:
            raise PolicyUsageError(f"turn: {NO_TOKENIZER}; expected token ids, got text")
        if self._is_too_long(text):
            message = (
                f"turn: expected at most {self.max_chars} characters (more never fit), got {self._num_chars(text)}"
            )
            raise ChunkRefusedError("chunk_too_long", message)
        reject(text_errors("turn", text))
        is_first = self._num_turns == 0
        rendered = self._plain(text) if self.render is None else self._rendered(text, self.render)
        # A template writes its own special tokens; plain text gets those that the tokenizer puts at a beginning.
        tokens = self.tokenizer.encode(rendered, add_special_tokens=is_first and self.render is None)
        if not tokens:
            reason = f"turn: expected text with at least one token, got {text!r}"
            raise PolicyUsageError(reason)
        return list(tokens)

    def sent(self) -> None:
        """Note that the turn encoded last was accepted by the session."""
        self._num_turns += 1

    def _num_chars(self, text: str) -> int:
        is_first = self._num_turns == 0
        return len(text) + len(self.system_prompt or "") * is_first

    def _is_too_long(self, text: str) -> bool:
        return self.max_chars is not None and self._num_chars(text) > self.max_chars

    def _plain(self, text: str) -> str:
        is_first = self._num_turns == 0
        return f"{self.system_prompt}{text}" if is_first and self.system_prompt else text

    def _rendered(self, text: str, render: Render) -> str:
        turn = [{"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        if self._num_turns == 0:
            return render(system + turn)
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": self._reply}]
        _, found, added = render(system + before + turn).partition(self._reply)
        if not found:
            raise PolicyUsageError(f"chat template: for this turn, the reply before does not stand in it; {WAY_OUT}")
        return added

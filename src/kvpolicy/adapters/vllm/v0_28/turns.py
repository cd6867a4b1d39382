"""Text turns as token ids: the model's chat template, cut into the part that each chunk adds."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from attrs import define, field

from kvpolicy.core.checks import reject, text_errors
from kvpolicy.core.errors import ChunkRefusedError, PolicyUsageError

# Characters from which on a turn is encoded in a thread: the loop would stand still for several milliseconds.
_LONG_TURN = 4_000
_NO_TOKENIZER = "the engine has no tokenizer (skip_tokenizer_init)"


@define
class TurnEncoder:
    """Turns text into the tokens of a chunk.

    With a chat template, the first turn is system prompt + user turn + the opening of a reply, and each later turn is
    the closing of the reply before it + user turn + opening. (The token that ended a reply was never computed, so the
    closing belongs to the next chunk.) Without one, the text is used as it is. A text of more than ``max_chars``
    characters is not even looked at. An engine without a tokenizer (None) takes no text.
    """

    tokenizer: Any
    system_prompt: str | None = None
    use_template: bool | None = None
    max_chars: int | None = None
    _num_turns: int = field(default=0, init=False)
    # Stands for the reply while the template is rendered; the text behind it is what the next turn adds.
    _reply: str = field(factory=lambda: f"reply-{secrets.token_hex(8)}", init=False)

    def __attrs_post_init__(self) -> None:
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        reasons = list(text_errors("system_prompt", self.system_prompt)) if self.system_prompt is not None else []
        if self.system_prompt and self.tokenizer is None:
            reasons.append(f"system_prompt: {_NO_TOKENIZER}; put its tokens into the first chunk")
        if self.use_template and not has_template:
            whose = _NO_TOKENIZER if self.tokenizer is None else "the model's tokenizer has no chat template"
            reasons.append(f"use_chat_template: {whose}; leave it out or pass False")
        reject(reasons)
        if self.use_template is None:
            self.use_template = has_template

    async def encode_aside(self, text: str) -> list[int]:
        """Return what ``encode`` returns; a long text is encoded in a thread while the loop goes on.

        Raises:
            ChunkRefusedError: as ``encode``.
            PolicyUsageError: as ``encode``.
        """
        num_chars = self._num_chars(text)
        # What is too long is refused at once: no thread is needed for that.
        is_long = num_chars > _LONG_TURN and (self.max_chars is None or num_chars <= self.max_chars)
        return await asyncio.to_thread(self.encode, text) if is_long else self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Return the tokens that this turn adds to the session.

        Raises:
            ChunkRefusedError: it is longer than any text that fits.
            PolicyUsageError: the turn has no tokens, is no text that UTF-8 can encode, or the engine has no tokenizer.
        """
        if self.tokenizer is None:
            raise PolicyUsageError(f"turn: {_NO_TOKENIZER}; expected token ids, got text")
        is_first = self._num_turns == 0
        num_chars = self._num_chars(text)
        if self.max_chars is not None and num_chars > self.max_chars:
            message = f"turn: expected at most {self.max_chars} characters (more never fit), got {num_chars}"
            raise ChunkRefusedError("chunk_too_long", message)
        reject(text_errors("turn", text))
        rendered = self._with_template(text, is_first=is_first) if self.use_template else self._plain(text, is_first)
        # A template writes its own special tokens; plain text gets those that the tokenizer puts at a beginning.
        tokens = self.tokenizer.encode(rendered, add_special_tokens=is_first and not self.use_template)
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

    def _plain(self, text: str, is_first: bool) -> str:  # noqa: FBT001 - private
        return f"{self.system_prompt}{text}" if is_first and self.system_prompt else text

    def _with_template(self, text: str, *, is_first: bool) -> str:
        turn = [{"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        if is_first:
            return self._render(system + turn)
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": self._reply}]
        return self._render(system + before + turn).split(self._reply, 1)[1]

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

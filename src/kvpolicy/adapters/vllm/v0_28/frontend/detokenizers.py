"""The text of a reply: what its tokens add to the text of the chunk before them, in whole characters.

vLLM's detokenizers are primed with the prompt. Where its last tokens do not decode to whole characters (a character
cut off, or a U+FFFD that was meant), the fast one begins with the text of the whole prompt, and the slow one loses the
character that the reply completes. A character that the chunk began and the reply completes belongs to the reply; one
that the reply does not complete stays the chunk's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.tokenizers.detokenizer_utils import _convert_tokens_to_string_with_added_encoders
from vllm.v1.engine.detokenizer import (
    BaseIncrementalDetokenizer,
    FastIncrementalDetokenizer,
    IncrementalDetokenizer,
    SlowIncrementalDetokenizer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.engine import EngineCoreRequest

# What decodes to this at the end may be the beginning of a character; UTF-8 has at most four bytes for one, and so a
# character that is not complete is at most the last three tokens.
_UNFINISHED = "\ufffd"
_MOST_TOKENS = 3


def reply_detokenizer(stock: IncrementalDetokenizer, tokenizer: Any, request: EngineCoreRequest) -> Any:
    """Return the detokenizer of a reply to a chunk, of the kind that vLLM has chosen for it (``stock``)."""
    match stock:
        case FastIncrementalDetokenizer():
            return FastReplyDetokenizer(tokenizer, request)
        case SlowIncrementalDetokenizer():
            return SlowReplyDetokenizer(tokenizer, request)
    return stock


class _ReplyDetokenizer(BaseIncrementalDetokenizer):
    """A detokenizer whose first text repeats the chunk's where that may be unfinished: the reply alone is returned."""

    chunk_texts: tuple[str, ...] = ()
    """What the first text may begin with: the chunk's text, and the same without its unfinished character."""

    def decode_next(self, next_token_id: int) -> str:
        """Return what one more token adds."""
        text = str(super().decode_next(next_token_id))
        if text and self.chunk_texts:
            text = text[max(_num_common(text, chunk) for chunk in self.chunk_texts) :]
            self.chunk_texts = ()
        return text


class FastReplyDetokenizer(_ReplyDetokenizer, FastIncrementalDetokenizer):
    """The one for tokenizers of the ``tokenizers`` package."""

    def __init__(self, tokenizer: Any, request: EngineCoreRequest) -> None:
        """Prime it with the chunk."""
        super().__init__(tokenizer, request)
        ids = request.prompt_token_ids or []
        self.chunk_texts = _texts_of(
            lambda num: str(self.tokenizer.decode(ids[:num], skip_special_tokens=self.skip_special_tokens)), len(ids)
        )


class SlowReplyDetokenizer(_ReplyDetokenizer, SlowIncrementalDetokenizer):
    """The one for tokenizers in Python.

    vLLM looks at the last five tokens of a prompt only. That window may begin inside a character as well, so where it
    seems to end inside one, the whole chunk is looked at.
    """

    tokens: list[str]
    prefix_offset: int

    def __init__(self, tokenizer: Any, request: EngineCoreRequest) -> None:
        """Prime it with the chunk."""
        super().__init__(tokenizer, request)
        if not self._text_of(self.tokens[self.prefix_offset :]).endswith(_UNFINISHED):
            return
        ids = request.prompt_token_ids or []
        # A token that the tokenizer does not have is None.
        tokens = [
            token or ""
            for token in self.tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=self.skip_special_tokens)
        ]
        self.chunk_texts = _texts_of(lambda num: self._text_of(tokens[:num]), len(tokens))
        self.tokens, self.prefix_offset = tokens, 0
        # Where the chunk is unfinished nothing of it counts as read, so that the first text begins with its own.
        self.read_offset = 0 if self.chunk_texts else len(tokens)

    def _text_of(self, tokens: list[str]) -> str:
        """Return the text of tokens as vLLM's incremental detokenization makes it."""
        if self.tokenizer.is_fast or not self.tokenizer.get_added_vocab():
            return str(self.tokenizer.convert_tokens_to_string(tokens))
        return str(
            _convert_tokens_to_string_with_added_encoders(
                self.tokenizer,
                tokens,
                skip_special_tokens=self.skip_special_tokens,
                spaces_between_special_tokens=self.spaces_between_special_tokens,
            )
        )


def _num_common(first: str, second: str) -> int:
    """Return with how many characters two texts begin alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))


def _texts_of(text_of: Callable[[int], str], num_tokens: int) -> tuple[str, ...]:
    """Return the texts of a chunk that may be unfinished; none if it is whole.

    ``text_of`` returns the text of so many of its tokens, from the first.
    """
    text = text_of(num_tokens)
    if not text.endswith(_UNFINISHED):
        return ()
    shorter = (text_of(num) for num in range(num_tokens - 1, max(num_tokens - _MOST_TOKENS, 0) - 1, -1))
    whole = next((short for short in shorter if not short.endswith(_UNFINISHED)), "")
    return text, whole

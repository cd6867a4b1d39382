"""The text of a reply is what its tokens add to the text of the chunk, in every family of tokenizers.

The expected texts are put together from the same words and characters as the tokens are: nothing is decoded for them.
"""

from __future__ import annotations

import base64
import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from kvpolicy.adapters.vllm.shared.metrics import CompactionCounters
from kvpolicy.adapters.vllm.v0_28.frontend.boundary_collector import BoundaryCollector
from kvpolicy.adapters.vllm.v0_28.frontend.output_processor import SessionOutputProcessor
from tests.models import tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WORDS = (" the", " pump", " is", " private")
# Of two, three and four bytes, and one that every decoder also writes where it cannot decode.
CHARACTERS = ("é", "龘", "😀", "\ufffd")
SPECIAL = "<|special|>"


@frozen(kw_only=True)
class Family:
    """A tokenizer with the tokens of some words (each with the space before it), and of characters byte by byte."""

    tokenizer: Any
    words: Mapping[str, tuple[int, ...]]
    characters: Mapping[str, tuple[int, ...]]
    special: int


class InPython:
    """A tokenizer that is not the ``tokenizers`` package's, as far as vLLM can see."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def byte_level() -> Family:
    tokenizer = tiny_tokenizer()
    return Family(
        tokenizer=tokenizer,
        words={word: tuple(tokenizer.encode(word)) for word in WORDS},
        characters={char: tuple(tokenizer.encode(char)) for char in CHARACTERS},
        special=tokenizer.bos_token_id,
    )


def byte_fallback() -> Family:
    """As Llama's: a space is a letter of its own, and the text loses the one that it begins with."""
    from tokenizers import decoders

    vocabulary = [SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *(f"▁{word[1:]}" for word in WORDS)]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _of_unigram(vocabulary, decoders.Sequence(steps))


def metaspace() -> Family:
    """As T5's: nothing but whole words."""
    from tokenizers import decoders

    return _of_unigram([SPECIAL, "<unk>", *(f"▁{word[1:]}" for word in WORDS)], decoders.Metaspace())


def _of_unigram(vocabulary: Sequence[str], decoder: Any) -> Family:
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.Unigram([(word, -1.0) for word in vocabulary], unk_id=1, byte_fallback=False))
    backend.decoder = decoder
    has_bytes = "<0x00>" in vocabulary
    return _family(backend, "▁", (lambda byte: f"<0x{byte:02X}>") if has_bytes else None)


def word_piece() -> Family:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = [SPECIAL, "[UNK]", *(word[1:] for word in WORDS)]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}))
    backend.decoder = decoders.WordPiece()
    return _family(backend, "", None)


def _family(backend: Any, space: str, byte_token: Callable[[int], str] | None) -> Family:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    backend.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    words = {word: (backend.token_to_id(f"{space}{word[1:]}"),) for word in WORDS}
    characters = (
        {}
        if byte_token is None
        else {char: tuple(backend.token_to_id(byte_token(byte)) for byte in char.encode()) for char in CHARACTERS}
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=[SPECIAL], clean_up_tokenization_spaces=False
    )
    return Family(tokenizer=tokenizer, words=words, characters=characters, special=backend.token_to_id(SPECIAL))


def tekken() -> Family:
    """Mistral's, on tiktoken."""
    from transformers.tokenization_mistral_common import MistralCommonBackend
    from vllm.tokenizers.mistral import MistralTokenizer

    num_special, vocabulary = 20, [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    config = {
        "pattern": r"[\s\S]+",
        "num_vocab_tokens": len(vocabulary),
        "default_vocab_size": len(vocabulary) + num_special,
        "default_num_special_tokens": num_special,
        "version": "v3",
    }
    tokens = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(vocabulary)
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tekken.json"
        path.write_text(json.dumps({"config": config, "vocab": tokens}), encoding="utf-8")
        tokenizer: Any = MistralTokenizer(MistralCommonBackend(path))
    return Family(
        tokenizer=tokenizer,
        words={word: (num_special + 256 + i,) for i, word in enumerate(WORDS)},
        characters={char: tuple(num_special + byte for byte in char.encode()) for char in CHARACTERS},
        special=tokenizer.bos_token_id,
    )


FAMILIES = {"byte level": byte_level, "byte fallback": byte_fallback, "metaspace": metaspace, "word piece": word_piece}


@cache
def family(name: str) -> Family:
    """Return a family by name; "... in Python": for vLLM's detokenization in Python."""
    if name == "tekken":
        return tekken()
    made = FAMILIES[name.removesuffix(" in Python")]()
    if not name.endswith(" in Python"):
        return made
    tokenizer = InPython(made.tokenizer)
    return Family(tokenizer=tokenizer, words=made.words, characters=made.characters, special=made.special)


EVERY_FAMILY = pytest.mark.parametrize("name", [*FAMILIES, *(f"{name} in Python" for name in FAMILIES), "tekken"])


def request_of(chunk: Sequence[int], kind: RequestOutputKind, *, resumable: bool = True) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="a",
        prompt_token_ids=list(chunk),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=99, output_kind=kind),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        resumable=resumable,
        external_req_id="a",
    )


def processor_of(tokenizer: Any) -> Any:
    ours: Any = SessionOutputProcessor
    return ours(
        tokenizer, log_stats=False, admission=None, request_guard=None, counters=CompactionCounters(), streams={}
    )


def said(
    processor: Any, queue: Any, chunk: Sequence[int], reply: Sequence[int], kind: RequestOutputKind, **more: Any
) -> list[str]:
    """Return the texts of the outputs of one reply, its tokens coming one by one."""
    processor.add_request(request_of(chunk, kind, **more), None, None, 0, queue)
    texts = []
    for i, token in enumerate(reply):
        ended = FinishReason.LENGTH if i == len(reply) - 1 else None
        processor.process_outputs([EngineCoreOutput("a", [token], finish_reason=ended)])
        output = queue.get_nowait()
        texts.append("" if output is None else output.outputs[0].text)
    return texts


def in_session(
    name: str, *turns: tuple[Sequence[int], Sequence[int]], kind: RequestOutputKind = RequestOutputKind.DELTA
) -> list[str]:
    """Return the texts of the replies of a session."""
    processor, queue = processor_of(family(name).tokenizer), BoundaryCollector(kind, "a")
    replies = [said(processor, queue, chunk, reply, kind) for chunk, reply in turns]
    return ["".join(texts) if kind is RequestOutputKind.DELTA else texts[-1] for texts in replies]


@st.composite
def turns(draw: st.DrawFn, name: str) -> tuple[list[int], list[int], str]:
    """Return a chunk, a reply, and the reply's text. The chunk may end, and the reply may begin, inside a character."""
    source = family(name)
    units = st.lists(st.sampled_from([*source.words.items(), *source.characters.items()]), max_size=4)
    words = st.sampled_from(list(source.words.items()))
    chunk = [token for _, tokens in [draw(words), *draw(units)] for token in tokens]
    reply, text = [], ""
    # A U+FFFD of which a part is missing is written as a whole one is.
    whole = {char: tokens for char, tokens in source.characters.items() if char != "\ufffd"}
    is_cut, is_completed = draw(st.booleans()), draw(st.booleans())
    if whole and is_cut:
        char, tokens = draw(st.sampled_from(list(whole.items())))
        cut = draw(st.integers(1, len(tokens) - 1))
        chunk += tokens[:cut]
        if is_completed:
            reply, text = list(tokens[cut:]), char
        else:
            text, tokens = draw(words)
            reply = list(tokens)
    for unit, tokens in [*draw(units), draw(words)]:
        text += unit
        reply += tokens
    return chunk, reply, text


@EVERY_FAMILY
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_reply_says_what_its_own_tokens_add(name: str, data: st.DataObject) -> None:
    """Through the first chunk and a later one, in pieces and in sums."""
    drawn = [data.draw(turns(name)) for _ in range(3)]
    kind = data.draw(st.sampled_from([RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE]))
    replies = in_session(name, *((chunk, reply) for chunk, reply, _ in drawn), kind=kind)
    assert replies == [text for _, _, text in drawn]


@pytest.mark.parametrize("name", ["byte level", "byte level in Python"])
def test_any_tokens_at_all_add_to_the_text_before_them(name: str) -> None:
    """Bytes that are no UTF-8 included: what the tokenizer makes of both together, less what it makes of the chunk."""
    tokenizer, draw = byte_level().tokenizer, random.Random(7)
    num_unfinished = 0
    for _ in range(400):
        chunk, reply = ([draw.randrange(4, 320) for _ in range(draw.randint(1, 6))] for _ in range(2))
        before, *texts = (tokenizer.decode(chunk + reply[:i]) for i in range(len(reply) + 1))
        complete = next((text for text in reversed(texts) if not text.endswith("\ufffd")), None)
        if complete is None:
            continue
        # The character that the chunk began is its last one; where the reply has completed it, it is another now.
        kept = before if complete.startswith(before) else before[:-1]
        assert complete.startswith(kept)
        assert in_session(name, (chunk, reply)) == [complete[len(kept) :]]
        num_unfinished += before.endswith("\ufffd")
    assert num_unfinished > 100


@pytest.mark.parametrize("name", ["byte fallback", "byte fallback in Python"])
def test_a_first_word_has_its_space_where_there_is_text_before_it(name: str) -> None:
    """What stands before a reply is its chunk; where that shows nothing, a text begins, and loses its first space."""
    source = family(name)
    word = source.words[" pump"]
    assert in_session(name, ((source.special,), word), (word, word), ((source.special,), word)) == [
        "pump",
        " pump",
        "pump",
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "stock", marks=pytest.mark.xfail(reason="it repeats the prompt", strict=True, raises=AssertionError)
        ),
        "ours",
    ],
)
@pytest.mark.parametrize("end", ["\ufffd", "é"])
def test_a_prompt_that_ends_in_no_whole_character_is_not_repeated(kind: str, end: str) -> None:
    """As text, and as tokens that were cut off."""
    tokenizer = tiny_tokenizer()
    prompt = tokenizer.encode(f"private line, cut here: caf{end}")[: None if end == "\ufffd" else -1]
    reply = tokenizer.encode(" the pump")
    if kind == "ours":
        assert in_session("byte level", (prompt, reply)) == [" the pump"]
        return
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "a")
    stock = OutputProcessor(tokenizer, log_stats=False)
    assert "".join(said(stock, queue, prompt, reply, RequestOutputKind.DELTA)) == " the pump"


def test_ordinary_requests_keep_the_stock_detokenizer() -> None:
    processor = processor_of(tiny_tokenizer())
    state_of = OutputProcessor.add_request
    request = request_of([5] * 5, RequestOutputKind.DELTA, resumable=False)
    state_of(processor, request, None, None, 0, RequestOutputCollector(RequestOutputKind.DELTA, "a"))
    assert type(processor.request_states["a"].detokenizer) is FastIncrementalDetokenizer

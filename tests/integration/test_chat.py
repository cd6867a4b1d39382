"""Turns of sessions beside vLLM's own chat route, and templates of all kinds cut into turns: no engine is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.registry import renderer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvpolicy.adapters.vllm import ChatFormat
from kvpolicy.adapters.vllm.shared.turns import TurnEncoder
from kvpolicy.adapters.vllm.v0_28.server.process import parsed, server_config
from kvpolicy.core.errors import PolicyUsageError
from kvpolicy.serving import SERVE_FLAGS
from tests.chat_templates import CAN_BE_CUT, CANNOT_BE_CUT, CHATML, GEMMA, PARTS, Style
from tests.pages import DOCS, first_names

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> Any:
    """Return vLLM's own, of an engine that is not started."""
    return renderer_from_config(AsyncEngineArgs(model=str(tiny_model), max_model_len=2048).create_engine_config())


def encoder(renderer: Any, chat: ChatFormat, system: str | None = None) -> TurnEncoder:
    render = chat.renderer(renderer)
    assert render is not None
    return TurnEncoder(renderer.tokenizer, render, system)


def conversation(*texts: str, system: str | None = None) -> list[Any]:
    """Return messages of a user and an assistant in turn."""
    before = [{"role": "system", "content": system}] if system else []
    return before + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


# -- as on the chat route

TWO_WAYS = (
    "{% for m in messages %}{{ m.role + ':' }}"
    "{% if m.content is string %}{{ m.content + '(text)' }}{% else %}"
    "{% for part in m.content %}{{ part.text + '(part)' }}{% endfor %}{% endif %}"
    "{% endfor %}{{ 'assistant:' }}"
)
FLAGS = {
    "the model's own": [],
    "from a file": ["--chat-template", "FILE"],
    "in the command line": ["--chat-template", CHATML.replace("assistant\n", "assistant: ")],
    "default arguments": [
        "--chat-template",
        "{{ note | default('none') }}" + CHATML,
        "--default-chat-template-kwargs",
        '{"note": "short"}',
    ],
    "no thinking": [
        "--chat-template",
        CAN_BE_CUT["qwen 3"].source,
        "--default-chat-template-kwargs",
        '{"enable_thinking": false}',
    ],
    "parts": ["--chat-template", "{{ 'In parts.\n' }}" + PARTS],
    "parts, as it looks": ["--chat-template", TWO_WAYS],
    "text, as asked for": ["--chat-template", TWO_WAYS, "--chat-template-content-format", "string"],
    "a special token at the front": ["--chat-template", CAN_BE_CUT["llama 3"].source],
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("system", [None, "You watch a log."])
def test_a_first_turn_has_the_tokens_of_the_chat_route(
    renderer: Any, tmp_path: Path, flags: list[str], system: str | None
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ 'From a file.\n' }}" + CHATML, encoding="utf-8")
    args = parsed(["model", *(str(file) if flag == "FILE" else flag for flag in flags)], SERVE_FLAGS)[0]
    route = OnlineRenderer(
        renderer.model_config,
        renderer,
        request_logger=None,
        chat_template=load_chat_template(args.chat_template),
        chat_template_content_format=args.chat_template_content_format,
        default_chat_template_kwargs=args.default_chat_template_kwargs,
    )
    request = ChatCompletionRequest(messages=conversation("Who is there?", system=system), model="model")
    _, [prompt] = asyncio.run(route.render_chat(request))
    ours = encoder(renderer, ChatFormat.from_flags(args), system).encode("Who is there?")
    assert ours == list(prompt["prompt_token_ids"])
    # Otherwise flags without any effect would be as good.
    assert (ours == encoder(renderer, ChatFormat(), system).encode("Who is there?")) == (not flags)


# -- templates cut into turns

WORDS = st.text(st.sampled_from("ab -<|>[]/.\n:é"), min_size=1, max_size=12)


@pytest.mark.parametrize("style", CAN_BE_CUT.values(), ids=CAN_BE_CUT)
@settings(max_examples=8)
@given(users=st.tuples(WORDS, WORDS, WORDS), said=st.tuples(WORDS, WORDS), system=WORDS)
def test_turns_and_replies_are_what_the_template_makes_of_the_conversation(
    renderer: Any, style: Style, users: tuple[str, ...], said: tuple[str, ...], system: str
) -> None:
    chat = ChatFormat(template=style.source, kwargs=style.kwargs)
    # What templates do to the ends of a reply, they cannot do to one that has been computed.
    contents = [f"({reply})" for reply in said]
    for given_system in [None, f"({system})"][: 1 + style.has_system]:
        turns = encoder(renderer, chat, given_system)
        held = ""
        for i, user in enumerate(users):
            held += renderer.tokenizer.decode(turns.encode(f"({user})"))
            turns.sent()
            if i < 2:
                held = held.removesuffix(style.kept) + style.blank + contents[i]
        texts = (f"({users[0]})", contents[0], f"({users[1]})", contents[1], f"({users[2]})")
        whole = renderer.get_tokenizer().apply_chat_template(
            as_parts(conversation(*texts, system=given_system), parts=style.source == PARTS),
            chat_template=style.source,
            tokenize=False,
            add_generation_prompt=True,
            **style.kwargs,
        )
        assert held == whole


def as_parts(messages: list[Any], *, parts: bool) -> list[Any]:
    if not parts:
        return messages
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


@pytest.mark.parametrize(("source", "reason"), CANNOT_BE_CUT.values(), ids=CANNOT_BE_CUT)
def test_a_template_that_cannot_be_cut_is_refused_at_once_with_the_reason(
    renderer: Any, source: str, reason: str
) -> None:
    with pytest.raises(PolicyUsageError) as caught:
        encoder(renderer, ChatFormat(template=source), "You watch a log.")
    assert all(said.startswith("chat template: ") for said in caught.value.reasons)
    assert any(reason in said for said in caught.value.reasons), caught.value.reasons


def test_what_was_kept_of_a_reply_is_not_in_the_next_turn(renderer: Any) -> None:
    """A thought of an earlier reply stays where it was said; the next turn is the same as without one."""
    style = CAN_BE_CUT["qwen 3 without thinking"]
    turns = encoder(renderer, ChatFormat(template=style.source, kwargs=style.kwargs))
    assert renderer.tokenizer.decode(turns.encode("hi")).endswith("assistant\n<think>\n\n</think>\n\n")
    turns.sent()
    later = renderer.tokenizer.decode(turns.encode("hi"))
    assert later == "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


RAISES = {
    "for a system prompt": (GEMMA, "System role not supported"),
    "for a second turn": (
        "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + CHATML,
        "one turn only",
    ),
    "always": ("{{ raise_exception('out of order') }}", "out of order"),
    "by its syntax": ("{% for %}" + CHATML, "Expected an expression"),
    "by what is not there": ("{{ messages[0].author.name }}" + CHATML, "has no attribute 'author'"),
    "by what cannot be done": ("{{ messages[0].content + 1 }}", "can only concatenate"),
}


@pytest.mark.parametrize(("source", "message"), RAISES.values(), ids=RAISES)
def test_what_a_template_raises_is_the_reason(renderer: Any, source: str, message: str) -> None:
    with pytest.raises(PolicyUsageError) as caught:
        encoder(renderer, ChatFormat(template=source), "You watch a log.")
    [reason] = caught.value.reasons
    assert reason.startswith("chat template: ")
    assert message in reason


def test_a_template_may_refuse_one_system_prompt_or_one_text(renderer: Any) -> None:
    rude = "{% for m in messages %}{% if 'rude' in m.content %}{{ raise_exception('be kind') }}{% endif %}{% endfor %}"
    chat = ChatFormat(template=rude + CHATML)
    with pytest.raises(PolicyUsageError, match="chat template: be kind"):
        encoder(renderer, chat, "a rude one")
    turns = encoder(renderer, chat, "a kind one")
    for _ in range(2):
        with pytest.raises(PolicyUsageError, match="chat template: be kind"):
            turns.encode("a rude one")
        assert turns.encode("a kind one")
        turns.sent()


def test_a_template_that_loses_the_reply_for_one_text_costs_that_turn(renderer: Any) -> None:
    forgets = "{% if 'forget' in messages[-1].content %}{{ messages[-1].content }}{% else %}" + CHATML + "{% endif %}"
    turns = encoder(renderer, ChatFormat(template=forgets))
    turns.encode("hello")
    turns.sent()
    with pytest.raises(PolicyUsageError, match="the reply before does not stand in it"):
        turns.encode("forget it")
    assert turns.encode("go on")


def test_a_template_that_writes_the_time_of_day_is_looked_at_twice(renderer: Any) -> None:
    """The second may change between two renderings: here it does, once."""
    render = ChatFormat().renderer(renderer)
    assert render is not None
    times: list[str] = []

    def stamped(messages: Any) -> str:
        times.append("12:00:00" if not times else "12:00:01")
        return times[-1] + render(messages)

    TurnEncoder(renderer.tokenizer, stamped)
    assert len(times) == 6


def test_a_chat_format_that_is_no_text_is_refused() -> None:
    """As that of tokenizers which write their special tokens themselves."""
    tokens = SimpleNamespace(render_messages=lambda *_: ([], {"prompt_token_ids": [1, 2]}))
    with pytest.raises(PolicyUsageError, match="is no text"):
        ChatFormat().renderer(tokens)


def test_without_any_template_there_is_nothing_to_render_with(renderer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer.tokenizer, "chat_template", None)
    assert ChatFormat().renderer(renderer) is None
    assert ChatFormat(template=CHATML).renderer(renderer) is not None


# -- flags

# Groups whose flags may shape a chat prompt, a reply, how it is parsed, or its defaults; and single ones of others.
GROUPS = ("Frontend", "ModelConfig", "StructuredOutputsConfig", "LoRAConfig")
SINGLE = ("--enable-log-requests", "--reasoning-config", "--structured-outputs-config", "--stream-interval")
# About the process, the network, or how the model is loaded and run.
ABOUT_OTHER_THINGS = (  # noqa: SIM905 - eighty quoted strings would be harder to read
    "--log-config-file --enable-server-load-tracking --log-error-stack --host --port "
    "--data-parallel-supervisor-port --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s "
    "--dp-supervisor-probe-failure-threshold --uds --uvicorn-log-level --disable-uvicorn-access-log "
    "--disable-access-log-for-endpoints --allow-credentials --allowed-origins --allowed-methods "
    "--allowed-headers --api-key --ssl-keyfile --ssl-certfile --ssl-ca-certs --enable-ssl-refresh "
    "--ssl-cert-reqs --ssl-ciphers --root-path --middleware --enable-request-id-headers --disable-fastapi-docs "
    "--h11-max-incomplete-event-size --h11-max-header-count --enable-offline-docs "
    "--enable-flash-late-interaction --model --runner --convert --trust-remote-code --dtype --seed "
    "--hf-config-path --allowed-local-media-path --allowed-media-domains --revision --code-revision "
    "--max-model-len --quantization --quantization-config --allow-deprecated-quantization --enforce-eager "
    "--enable-return-routed-experts --use-fp64-gumbel --disable-sliding-window --disable-cascade-attn "
    "--config-format --hf-token --hf-overrides --model-class-overrides --pooler-config --enable-sleep-mode "
    "--enable-cumem-allocator --model-impl --io-processor-plugin --renderer-num-workers --max-loras "
    "--max-lora-rank --lora-dtype --enable-tower-connector-lora --max-cpu-loras --fully-sharded-loras "
    "--lora-target-modules --specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras"
).split()


def test_every_flag_about_chats_is_in_the_table() -> None:
    """A flag that a next version of vLLM brings is in neither list: somebody has to say what it does in sessions."""
    parser = make_arg_parser(FlexibleArgumentParser())
    flags = {
        action.option_strings[0]
        for group in parser._action_groups
        for action in group._group_actions
        if action.option_strings and (group.title in GROUPS or action.option_strings[0] in SINGLE)
    }
    documented = first_names(DOCS / "reference" / "chat-templates.md", "Flags about chats")
    assert len(documented) == len(set(documented))
    assert not {*ABOUT_OTHER_THINGS} & {*documented}
    assert flags == {*ABOUT_OTHER_THINGS, *documented}


REFUSED = {
    "--reasoning-parser": "--reasoning-parser qwen3",
    "--reasoning-parser deepseek_r1": '--structured-outputs-config {"reasoning_parser":"deepseek_r1"}',
    "--reasoning-config": "--reasoning-config {}",
    "--tokens-only": "--tokens-only",
    "--override-generation-config temperature, top_k": '--override-generation-config {"temperature":1,"top_k":5}',
    "--generation-config": "--generation-config /tmp",
}


def test_every_flag_that_sessions_would_not_follow_is_refused_by_name_at_once(tiny_model: Path) -> None:
    usual = [str(tiny_model), "--max-model-len", "512", "--max-num-seqs", "8"]
    for name, flags in REFUSED.items():
        with pytest.raises(PolicyUsageError) as caught:
            server_config(*parsed([*usual, "--enable-streaming", *flags.split()], SERVE_FLAGS))
        assert any(reason.startswith(name) for reason in caught.value.reasons), caught.value.reasons
        # A server with a policy only has the chat route and no other.
    rest = " ".join(flags for name, flags in REFUSED.items() if name != "--reasoning-parser deepseek_r1")
    with pytest.raises(PolicyUsageError) as caught:
        server_config(*parsed([*usual, "--enable-streaming", *rest.split()], SERVE_FLAGS))
    assert len([reason for reason in caught.value.reasons if reason.startswith(tuple(REFUSED))]) == len(REFUSED) - 1


def test_what_no_session_is_affected_by_is_not_refused(tiny_model: Path) -> None:
    usual = [str(tiny_model), "--max-model-len", "512", "--max-num-seqs", "8"]
    harmless = '--generation-config vllm --override-generation-config {"eos_token_id":5} --response-role bot'
    tools = "--enable-auto-tool-choice --tool-call-parser hermes --enable-force-include-usage"
    server_config(*parsed([*usual, "--enable-streaming", *harmless.split(), *tools.split()], SERVE_FLAGS))
    server_config(*parsed([*usual, "--kv-cache-policy", "randkv", "--reasoning-parser", "qwen3"], SERVE_FLAGS))

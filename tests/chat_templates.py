"""Chat templates of our own, in the style of those that models bring: some can be cut into turns, some cannot."""

from __future__ import annotations

from attrs import field, frozen

_OPENING = "{% if add_generation_prompt %}{{ opening }}{% endif %}"


@frozen(kw_only=True)
class Style:
    """One template.

    Attributes:
        source: Jinja.
        kwargs: its further arguments.
        has_system: whether it takes a system prompt.
        kept: what its opening writes at the beginning of a reply, and earlier replies of the template do not have.
        blank: what a model of this style says first.
    """

    source: str
    kwargs: dict[str, object] = field(factory=dict)
    has_system: bool = True
    kept: str = ""
    blank: str = ""


def _in_tags(before: str, after: str, opening: str, *, content: str = "m.content", start: str = "") -> str:
    """Return a template that puts every message between two texts, which may name its role ``m.role``."""
    return (
        f"{{{{ {start!r} }}}}"
        "{% for m in messages %}"
        f"{{{{ {before} + {content} + {after} }}}}"
        "{% endfor %}" + _OPENING.replace("opening", opening)
    )


_MERGED = (
    "{{% set ns = namespace(first='') %}}"
    "{{% for m in messages %}}"
    "{{% if m.role == 'system' %}}{{% set ns.first = m.content %}}"
    "{{% elif m.role == 'user' %}}"
    "{{{{ {user} }}}}"
    "{{% set ns.first = '' %}}"
    "{{% else %}}{{{{ {assistant} }}}}{{% endif %}}"
    "{{% endfor %}}"
)
_THOUGHTS = (
    "{% for m in messages %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content %}"
    "{{ '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
CHATML = _in_tags("'<|im_start|>' + m.role + '\n'", "'<|im_end|>\n'", "'<|im_start|>assistant\n'")
GEMMA = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + _in_tags(
    "'<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n'",
    "'</turn>\n'",
    "'<turn>model\n'",
    content="(m.content | trim)",
    start="<|start|>",
)
# The system prompt goes in front of whatever text of a user is the last.
LAST_USER = (
    "{% set ns = namespace(system='') %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
    "{% elif m.role == 'user' and loop.last %}{{ '[INST] ' + ns.system + m.content + '[/INST]' }}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}"
    "{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CAN_BE_CUT = {
    "chatml": Style(source=CHATML),
    "content in parts": Style(source=PARTS),
    "llama 2": Style(
        source=_MERGED.format(
            user="'<s>[INST] ' + ('<<SYS>>' + ns.first + '<</SYS>>\n' if ns.first else '') + m.content + ' [/INST]'",
            assistant="' ' + (m.content | trim) + ' </s>'",
        ),
        blank=" ",
    ),
    "llama 3": Style(
        source=_in_tags(
            "'<|head|>' + m.role + '<|/head|>\n\n'",
            "'<|im_end|>'",
            "'<|head|>assistant<|/head|>\n\n'",
            content="(m.content | trim)",
            start="<|start|>",
        )
    ),
    "llama 3 with a date": Style(
        source="{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML,
    ),
    "mistral 1": Style(
        source=_MERGED.format(
            user="'[INST] ' + (ns.first + '\n\n' if ns.first else '') + m.content + ' [/INST]'",
            assistant="m.content + '</s>'",
        )
    ),
    "mistral 3": Style(source=LAST_USER, has_system=False, blank=" "),
    "gemma": Style(source=GEMMA, has_system=False),
    "zephyr": Style(source=_in_tags("'<|' + m.role + '|>\n'", "'</s>\n'", "'<|assistant|>\n'")),
    "phi 3": Style(source=_in_tags("'<|' + m.role + '|>\n'", "'<|end|>\n'", "'<|assistant|>\n'")),
    "qwen 2": Style(
        source="{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
        + CHATML
    ),
    "qwen 3": Style(source=_THOUGHTS),
    "qwen 3 without thinking": Style(
        source=_THOUGHTS, kwargs={"enable_thinking": False}, kept="<think>\n\n</think>\n\n"
    ),
    "deepseek": Style(
        source=_MERGED.format(
            user="(ns.first or '') + '<|User|>' + m.content",
            assistant="'<|Assistant|>' + m.content.split('</think>')[-1] + '<|end|>'",
        )
        + _OPENING.replace("opening", "'<|Assistant|><think>\n'"),
        kept="<think>\n",
    ),
}


def _each(user: str, assistant: str, opening: str = "'A:'") -> str:
    return (
        "{% for m in messages %}"
        f"{{% if m.role == 'assistant' %}}{{{{ {assistant} }}}}{{% else %}}{{{{ {user} }}}}{{% endif %}}"
        "{% endfor %}" + _OPENING.replace("opening", opening)
    )


_USER, _ASSISTANT = "m.role + ':' + m.content + '\n'", "'A:' + m.content + '\n'"
_EARLIER, _SYSTEM = "earlier replies do not stand in it", "the system prompt does not stand in the first turn"
_BETWEEN = "what stands between a reply and the next turn"
# With what is said of each; those that need a system prompt for it are given one.
CANNOT_BE_CUT = {
    "no earlier replies": (_each(_USER, "''"), _EARLIER),
    "the last message only": ("{{ 'U:' + messages[-1].content + '\nA:' }}", _EARLIER),
    "replies twice": (_each(_USER, _ASSISTANT + " + m.content"), _EARLIER),
    "replies in capitals": (_each(_USER, "'A:' + (m.content | upper)"), _EARLIER),
    "replies with a capital": (_each(_USER, "'A:' + (m.content | capitalize)"), _EARLIER),
    "replies in one line": (_each(_USER, "'A:' + m.content.replace('\n', ' ') + '\n'"), _EARLIER),
    "replies as JSON": (_each(_USER, "'A:' + (m.content | tojson) + '\n'"), _EARLIER),
    "replies cut short": (_each(_USER, "'A:' + m.content[:100] + '\n'"), _EARLIER),
    "users twice": (_each(_USER + " + m.content", _ASSISTANT), "a user's text does not stand in it once"),
    "the system prompt with the last user": (LAST_USER, _SYSTEM),
    "the system prompt at the end": (
        _each("m.role + ':' + m.content if m.role == 'user' else ''", _ASSISTANT, "'S:' + messages[0].content + 'A:'"),
        _SYSTEM,
    ),
    "the system prompt in every turn": (
        _each("'S:' + messages[0].content + 'U:' + m.content if m.role == 'user' else ''", _ASSISTANT),
        _SYSTEM,
    ),
    "the system prompt ignored": (_each("m.content if m.role == 'user' else ''", _ASSISTANT), _SYSTEM),
    "newest first": ("{% for m in messages | reverse %}{{ m.content + '\n' }}{% endfor %}", "in their order"),
    "a count at the front": ("{{ messages | length }}" + CHATML, "the beginning of a conversation changes"),
    "numbered turns": (_each("loop.index ~ m.role + ':' + m.content", _ASSISTANT), _BETWEEN),
    "no closing of the last reply": (
        _each("m.content", "'A:' + m.content + ('' if loop.index0 == messages | length - 2 else '\n')"),
        _BETWEEN,
    ),
    "counted openings": (_each(_USER, _ASSISTANT, "'A' ~ (messages | length) ~ ':'"), "before a reply is not the same"),
    "another opening": (_each(_USER, _ASSISTANT, "'Bot:'"), "begins otherwise"),
    "a clock": ("{{ strftime_now('%f') }}" + CHATML, "the beginning of a conversation changes"),
}

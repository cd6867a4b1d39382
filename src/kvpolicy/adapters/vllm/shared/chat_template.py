"""Whether a chat template can be cut into turns, found out by rendering made-up conversations. Knows no engine."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

Messages = Sequence[dict[str, str]]
Render = Callable[[Messages], str]
"""Returns the text of a conversation with the opening of a reply at its end, as the chat route would send it.

Raises:
    PolicyUsageError: the template does, with what it says.
"""

WAY_OUT = "use another (--chat-template FILE; in Python chat_format=), or none (use_chat_template=False)"
# A reply may be of many lines, and have quotes and markup in it: all of them must come back as they are.
_REPLY = 'rePly {}: "a" & <b>\n\n  second {}'


def _number() -> str:
    """Return a text that no template changes, and that is in no other text."""
    return f"{secrets.randbelow(10**16):016d}"


def made_up_reply() -> str:
    """Return a reply that is in no other text, and that a template can only change if it changes replies at all."""
    return _REPLY.format(_number(), "line " * 40 + "end")


@frozen
class _Conversation:
    """Up to three turns, of texts that can be found again."""

    system: str | None
    users: tuple[str, ...] = field(factory=lambda: tuple(_number() for _ in range(3)))
    replies: tuple[str, ...] = field(factory=lambda: (made_up_reply(), made_up_reply()))

    def messages(self, num_turns: int) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for i in range(num_turns):
            messages += [{"role": "assistant", "content": self.replies[i - 1]}] * (i > 0)
            messages.append({"role": "user", "content": self.users[i]})
        return messages


@frozen
class _Cut:
    """A rendering between the texts of its users and its replies.

    ``before`` has what stands before each user's text and ``after`` what stands behind it, before the reply.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]


def template_errors(render: Render, *, has_system: bool) -> tuple[str, ...]:
    """Return why a template cannot be cut into turns; empty if it can.

    It can be if, up to blanks at both ends of a reply,

        rendering of a conversation = first turn + reply + later turn + reply + later turn ...

    where the first turn is the rendering of a conversation of one turn, and a later turn is what the rendering of a
    conversation of two has behind the reply. That is so if

    - every text of the conversation is in the rendering once, in its place, and replies are as they were given;
    - what stands between a reply and the next user's text, and between that and the reply, is the same in every turn;
    - what stands before the first user's text does not depend on what follows.

    An opening may be longer than what stands before an earlier reply (an empty or begun thought, ``<think>``): that is
    the beginning of the reply then, and stays with it. So does whatever a template would take out of some earlier
    replies only (thoughts that they have, blanks at their ends): what was said stays in the session as it was said.

    Args:
        render: renders a conversation.
        has_system: whether conversations begin with a system prompt.

    Raises:
        PolicyUsageError: the template raises for a conversation of up to three turns.
    """
    # Once more where there is something, since a template may write the time, and the second may have changed.
    return _errors(render, has_system=has_system) and _errors(render, has_system=has_system)


def _errors(render: Render, *, has_system: bool) -> tuple[str, ...]:
    talk = _Conversation(_number() if has_system else None)
    rendered = [render(talk.messages(num_turns)) for num_turns in (1, 2, 3)]
    reasons = [reason for i, text in enumerate(rendered) for reason in _misplaced(text, talk, i + 1)]
    if not reasons:
        reasons += _differences([_cut(text, talk, i + 1) for i, text in enumerate(rendered)])
    return tuple(f"chat template: {reason}; {WAY_OUT}" for reason in dict.fromkeys(reasons))


def _misplaced(text: str, talk: _Conversation, num_turns: int) -> Iterator[str]:
    """Yield which texts of a conversation are not in its rendering once, in their places."""
    replies, users = talk.replies[: num_turns - 1], talk.users[:num_turns]
    head = text.partition(talk.replies[0])[0]
    if any(text.count(reply) != 1 for reply in replies):
        yield "earlier replies do not stand in it once and unchanged"
    if any(text.count(user) != 1 for user in users):
        yield "a user's text does not stand in it once"
    if talk.system and not head.count(talk.system) == text.count(talk.system) == 1:
        yield "the system prompt does not stand in the first turn, and there alone"
    order = [text.find(part) for pair in zip(users, (*replies, ""), strict=True) for part in pair if part]
    if any(first > second >= 0 for first, second in pairwise(order)):
        yield "turns do not stand in it in their order"


def _cut(text: str, talk: _Conversation, num_turns: int) -> _Cut:
    before, after = [], []
    for user, reply in zip(talk.users[:num_turns], (*talk.replies[: num_turns - 1], ""), strict=True):
        front, _, text = text.partition(user)
        back, _, text = text.partition(reply) if reply else (text, "", "")
        before.append(front)
        after.append(back)
    return _Cut(tuple(before), tuple(after))


def _differences(cuts: Sequence[_Cut]) -> Iterator[str]:
    """Yield what is not the same in every turn of renderings of one, two and three turns."""
    if len({cut.before[0] for cut in cuts}) > 1:
        yield "the beginning of a conversation changes with later turns"
    if len({between for cut in cuts for between in cut.before[1:]}) > 1:
        yield "what stands between a reply and the next turn is not the same in every turn"
    openings = {cut.after[-1] for cut in cuts}
    heads = {between for cut in cuts for between in cut.after[:-1]}
    if len(openings) > 1 or len(heads) > 1:
        yield "what stands before a reply is not the same in every turn"
    elif not openings.pop().startswith(heads.pop().rstrip()):
        yield "an earlier reply begins otherwise than the one that is asked for"

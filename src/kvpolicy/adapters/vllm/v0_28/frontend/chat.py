"""How vLLM's chat route makes text of a conversation, for turns of sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from jinja2 import TemplateError
from vllm.entrypoints.chat_utils import ChatTemplateResolutionError, load_chat_template
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError

from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from vllm.renderers import BaseRenderer, ChatParams

    from kvpolicy.adapters.vllm.shared.chat_template import Messages, Render


@frozen(kw_only=True)
class ChatFormat:
    """What shapes a chat prompt, beside its messages.

    Attributes:
        template: Jinja source, or the name of one of the model's templates; None: the one that the model brings.
        content_format: whether a message's content is a text ("string"), or a list of parts ("openai"); "auto": what
            the template looks like.
        kwargs: further arguments of the template.
    """

    template: str | None = None
    content_format: str = "auto"
    kwargs: Mapping[str, Any] = field(factory=dict)

    @classmethod
    def from_flags(cls, args: Namespace) -> ChatFormat:
        """Return what the chat route of a server with these flags has."""
        return cls(
            template=load_chat_template(args.chat_template),
            content_format=args.chat_template_content_format,
            kwargs=args.default_chat_template_kwargs or {},
        )

    def _params(self) -> ChatParams:
        """Return what the chat route gives to its renderer for a request that asks for nothing of its own."""
        request = ChatCompletionRequest(messages=[])
        params = request.build_chat_params(self.template, self.content_format)
        # As ``OnlineRenderer.preprocess_chat`` merges them; where that would have tokens, they are those of the text.
        return params.with_defaults({**self.kwargs, "tokenize": False})

    def renderer(self, renderer: BaseRenderer) -> Render | None:
        """Return what renders a conversation as the chat route does; None: the model has no chat template.

        Raises:
            PolicyUsageError: the template cannot even render one short turn, with what it says.
        """
        params = self._params()

        def render(messages: Messages) -> str:
            try:
                _, prompt = renderer.render_messages([*messages], params)
            except ChatTemplateResolutionError:
                raise
            except (ValueError, VLLMClientError, TemplateError) as error:
                raise PolicyUsageError(f"chat template: {error}") from error
            if "prompt" not in prompt:
                reason = (
                    f"chat template: the model's is no text ({type(renderer).__name__}), so it cannot be cut into "
                    "turns; use use_chat_template=False, or push token ids"
                )
                raise PolicyUsageError(reason)
            return str(prompt["prompt"])

        try:
            render([{"role": "user", "content": "-"}])
        except ChatTemplateResolutionError:
            return None
        return render

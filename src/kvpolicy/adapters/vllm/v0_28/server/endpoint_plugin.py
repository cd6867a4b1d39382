"""Routes for sessions as an endpoint plugin of vLLM: for servers that others compose around our engine.

vLLM loads endpoint plugins only when they are named in ``VLLM_PLUGINS``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpolicy.adapters.vllm.v0_28.frontend.async_llm import AsyncLLM
from kvpolicy.adapters.vllm.v0_28.frontend.chat import ChatFormat
from kvpolicy.adapters.vllm.v0_28.server.process import PLUGIN_MARK
from kvpolicy.adapters.vllm.v0_28.server.server_guards import media_errors, process_errors, session_errors
from kvpolicy.adapters.vllm.v0_28.server.session_engine import SessionEngine, awaited_from_elsewhere
from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from kvpolicy.adapters.vllm.shared.frontend_port import FrontendPort


class SessionEndpoints:
    """The plugin. Satisfies vLLM's ``EndpointPlugin``."""

    name = "kvpolicy"
    required_tasks = ("generate",)

    def __init__(self, make_frontend: Callable[[], FrontendPort]) -> None:
        """Know no application yet; ``make_frontend`` makes the routes for one."""
        self._make_frontend = make_frontend
        self._app: FastAPI | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Keep the application: whether there are routes depends on its engine, which comes later."""
        self._app = app

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Add the routes.

        Raises:
            PolicyUsageError: every reason why there can be no sessions, such as an engine that is not ours: the server
                does not start.
        """
        if self._app is None or hasattr(state, PLUGIN_MARK):
            # ``kvpolicy serve`` decides for itself.
            return
        if not isinstance(engine_client, AsyncLLM):
            reason = (
                f"VLLM_PLUGINS={self.name}: sessions need kvpolicy's engine, got {type(engine_client).__name__}; "
                "start the server with: kvpolicy serve MODEL --enable-streaming"
            )
            raise PolicyUsageError([*process_errors(args), *session_errors(args), reason])
        if reasons := [*process_errors(args), *session_errors(args), *media_errors(engine_client.vllm_config)]:
            raise PolicyUsageError(reasons)
        frontend = self._make_frontend()
        frontend.attach(self._app)
        frontend.start(SessionEngine(engine_client, args.served_model_name or (), ChatFormat.from_flags(args)))
        engine_client.call_before_shutdown(awaited_from_elsewhere(frontend.stop))

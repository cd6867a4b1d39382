"""Routes for sessions as an endpoint plugin of vLLM: for servers that others compose around our engine.

vLLM loads endpoint plugins only when they are named in ``VLLM_PLUGINS``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpolicy.adapters.http.frontend import SessionFrontend
from kvpolicy.adapters.http.settings import ServerSettings
from kvpolicy.adapters.vllm.v0_28.async_llm import AsyncLLM
from kvpolicy.adapters.vllm.v0_28.server import PLUGIN_MARK
from kvpolicy.adapters.vllm.v0_28.server_guards import media_errors, process_errors
from kvpolicy.adapters.vllm.v0_28.session_engine import SessionEngine, awaited_from_elsewhere
from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from fastapi import FastAPI


class SessionEndpoints:
    """The plugin. Satisfies vLLM's ``EndpointPlugin``."""

    name = "kvpolicy"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        """Know no application yet."""
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
            raise PolicyUsageError([*process_errors(args), reason])
        if reasons := [*process_errors(args), *media_errors(engine_client.vllm_config)]:
            raise PolicyUsageError(reasons)
        frontend = SessionFrontend(ServerSettings())
        frontend.attach(self._app)
        frontend.start(SessionEngine(engine_client, args.served_model_name or ()))
        engine_client.call_before_shutdown(awaited_from_elsewhere(frontend.stop))

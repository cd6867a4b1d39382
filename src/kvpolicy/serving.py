"""The composition root of servers: the session frontend over HTTP joined with vLLM's server. Nothing else imports both.

Importing this module imports neither vLLM nor FastAPI; what is called here does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvpolicy.adapters.http.settings import ServerSettings
from kvpolicy.adapters.vllm import adapter_package
from kvpolicy.adapters.vllm.shared.serve_options import ServeFlags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpolicy.adapters.vllm.shared.diagnosis import Diagnosis
    from kvpolicy.adapters.vllm.shared.frontend_port import FrontendPort

SERVE_FLAGS = ServeFlags(ServerSettings)
"""What ``kvpolicy serve`` takes beside vLLM's own flags."""


def serve(arguments: Sequence[str]) -> int:
    """Serve until told to stop; return the exit status: 0 when told to, 1 when the engine has died.

    Args:
        arguments: of the command line: a model, vLLM's flags and ours.

    Raises:
        PolicyUsageError: every reason why there can be no such server, before a model is loaded.
        SystemExit: by vLLM's parser: help was asked for, or there is no such flag.
    """
    process = importlib.import_module(f"{adapter_package()}.server.process")
    return int(process.serve(arguments, SERVE_FLAGS, _frontend))


def diagnose(arguments: Sequence[str]) -> Diagnosis:
    """Return what works here, for a server with these arguments (of ``kvpolicy serve``; the model may be missing).

    Raises:
        SystemExit: by vLLM's parser: there is no such flag.
    """
    doctor = importlib.import_module(f"{adapter_package()}.server.doctor")
    diagnosis: Diagnosis = doctor.diagnose(arguments, SERVE_FLAGS)
    return diagnosis


def endpoint_plugin() -> Any:
    """Return the plugin that adds routes for sessions to a vLLM server (group ``vllm.endpoint_plugins``)."""
    plugin = importlib.import_module(f"{adapter_package()}.server.endpoint_plugin")
    return plugin.SessionEndpoints(lambda: _frontend(ServerSettings()))


def _frontend(settings: ServerSettings) -> FrontendPort:
    from kvpolicy.adapters.http.frontend import SessionFrontend

    return SessionFrontend(settings)

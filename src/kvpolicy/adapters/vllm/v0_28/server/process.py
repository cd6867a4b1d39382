"""The server: vLLM's own OpenAI-compatible one, with our engine in it and, when asked for, routes for sessions.

vLLM's ``serve`` command makes a stock engine and no other, so the few steps from its parser to its HTTP loop are
taken here. Nothing of ours is in the way of a server that asks for nothing of ours.
"""

from __future__ import annotations

import logging
import signal
from argparse import Namespace
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import uvloop
from attrs import define, field
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launcher import serve_http
from vllm.entrypoints.openai.api_server import build_app, init_app_state, setup_server
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.entrypoints.serve.utils.server_utils import get_uvicorn_log_config
from vllm.exceptions import VLLMClientError
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM as StockAsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from kvpolicy.adapters.vllm.shared.log import write_to_stderr
from kvpolicy.adapters.vllm.shared.options import policy_errors
from kvpolicy.adapters.vllm.shared.serve_options import ServeFlags, ServeOptions, as_typed
from kvpolicy.adapters.vllm.v0_28.frontend.async_llm import AsyncLLM
from kvpolicy.adapters.vllm.v0_28.frontend.chat import ChatFormat
from kvpolicy.adapters.vllm.v0_28.server.server_guards import media_errors, process_errors, session_errors
from kvpolicy.adapters.vllm.v0_28.server.session_engine import SessionEngine, awaited_from_elsewhere
from kvpolicy.adapters.vllm.v0_28.startup.engine_args import session_config_errors, session_engine_args
from kvpolicy.core.checks import reject
from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fastapi import FastAPI
    from vllm.config import VllmConfig

    from kvpolicy.adapters.vllm.shared.frontend_port import FrontendPort

    MakeFrontend = Callable[[Any], FrontendPort]

PLUGIN_MARK = "kvpolicy_composed"
"""Name in the state of an app that has been composed here: the endpoint plugin leaves it alone."""

DIED = 1
# How long the end of the process waits for answers under way.
_DRAIN_S = 5
_CONTEXT = UsageContext.OPENAI_API_SERVER


def serve(arguments: Sequence[str], flags: ServeFlags, make_frontend: MakeFrontend) -> int:
    """Serve until told to stop; return the exit status: 0 when told to, 1 when the engine has died.

    Args:
        arguments: of the command line: a model, vLLM's flags and ours.
        flags: ours.
        make_frontend: what makes the routes for sessions, with the limits that the flags ask for.

    Raises:
        PolicyUsageError: every reason why there can be no such server: what the flags and the configuration tell before
            a model is loaded, what the loaded model tells before anything is served.
        SystemExit: by vLLM's parser: help was asked for, or there is no such flag.
    """
    # As vLLM's own command does first.
    cli_env_setup()
    args, options, reasons = parsed(arguments, flags)
    if options.is_stock:
        reject(reasons)
        if args.mm_processor_cache_gb is None:
            args.mm_processor_cache_gb = AsyncEngineArgs.mm_processor_cache_gb
        ServeSubcommand.cmd(args)
        return 0
    config = server_config(args, options, reasons)
    write_to_stderr()
    return int(uvloop.run(_Server(args, options, config, make_frontend).run()))


def parsed(
    arguments: Sequence[str], flags: ServeFlags, prog: str = "kvpolicy serve"
) -> tuple[Namespace, ServeOptions, list[str]]:
    """Return what the command line says, to vLLM and to us, and every reason why there can be no such server.

    Raises:
        SystemExit: by vLLM's parser.
    """
    parser = make_arg_parser(FlexibleArgumentParser(prog=prog, usage=f"{prog} MODEL [options]"))
    flags.add_to(parser)
    # Where this is None afterwards, nobody has asked for it: vLLM's default would look like a wish.
    args = parser.parse_args(list(arguments), Namespace(mm_processor_cache_gb=None))
    if args.model_tag is not None:
        args.model = args.model_tag
    options, ours = flags.take(args)
    reasons = list(ours)
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError, VLLMClientError) as error:
        reasons.append(str(error))
    return args, options, reasons


def server_config(args: Namespace, options: ServeOptions, reasons: Sequence[str]) -> VllmConfig:
    """Return the engine's configuration, checked; no model is loaded.

    Raises:
        PolicyUsageError: every reason why there can be no such server, with those that are known before (``reasons``).
    """
    config, found = configuration(args, options)
    reasons = [*reasons, *process_errors(args), *found]
    if options.enable_streaming:
        reasons += session_errors(args)
    if config is None:
        reasons += policy_errors(options.kv_cache_policy)
    else:
        reasons += [*media_errors(config), *session_config_errors(config)]
    if config is None or reasons:
        raise PolicyUsageError(dict.fromkeys(map(as_typed, reasons)))
    return config


def configuration(args: Namespace, options: ServeOptions) -> tuple[VllmConfig | None, tuple[str, ...]]:
    """Return the engine's configuration as the flags ask for it, and why they cannot ask so; its guards come later.

    Where a flag must have the value that kvpolicy needs, it has it. None: there can be no configuration at all.
    """
    if args.mm_processor_cache_gb is None:
        # Nobody asked for it, and an item that it knows comes without the data that an evicted one needs.
        args.mm_processor_cache_gb = 0
    reasons: tuple[str, ...] = ()
    try:
        stock = AsyncEngineArgs.from_cli_args(args)
        given = {field.name: getattr(stock, field.name) for field in fields(stock)}
        ours, reasons = session_engine_args(
            given, max_sessions=options.max_sessions, kv_cache_policy=options.kv_cache_policy
        )
        return ours.create_engine_config(_CONTEXT), reasons
    except Exception as error:  # noqa: BLE001 - vLLM has errors of many kinds, assertions too: none may hide our reasons
        return None, (*reasons, f"engine configuration: {str(error) or type(error).__name__}")


@define
class _Server:
    """One server process."""

    args: Namespace
    options: ServeOptions
    config: VllmConfig
    make_frontend: MakeFrontend
    was_told_to_stop: bool = field(default=False, init=False)
    frontend: FrontendPort | None = field(default=None, init=False)

    async def run(self) -> int:
        """Start the engine, serve, stop it; return the exit status."""
        # Until the HTTP loop has its own handlers: an engine that is starting is given up.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _give_up)
        # The port first, as vLLM does: who cannot have it need not wait for a model.
        try:
            _, sock = setup_server(self.args, reuse_port=False)
        except OSError as error:
            raise PolicyUsageError(f"--port {self.args.port}: {error.strerror}; choose another with --port") from error
        try:
            engine = AsyncLLM(
                vllm_config=self.config,
                usage_context=_CONTEXT,
                log_requests=self.args.enable_log_requests,
                aggregate_engine_logging=self.args.aggregate_engine_logging,
                log_stats=not self.args.disable_log_stats,
            )
            try:
                closing = await self._serve(engine, sock)
                died = not self.was_told_to_stop
                await self._stop_sessions()
            finally:
                engine.shutdown(timeout=self.config.shutdown_timeout)
            await closing
        finally:
            sock.close()
        return DIED if died else 0

    async def _serve(self, engine: AsyncLLM, sock: Any) -> Awaitable[None]:
        """Serve until the server ends; return what vLLM wants to be awaited when the engine is gone."""
        # What the engine starts with need not stay in memory.
        await engine.reset_mm_cache()
        app = await self._app(engine)
        stop_sessions = awaited_from_elsewhere(self._stop_sessions)

        def told_to_stop() -> None:
            self.was_told_to_stop = True
            expect_the_end()
            stop_sessions()

        engine.call_before_shutdown(told_to_stop)
        args, log_config = self.args, get_uvicorn_log_config(self.args)
        closing: Awaitable[None] = await serve_http(
            app,
            sock=sock,
            enable_ssl_refresh=args.enable_ssl_refresh,
            host=args.host,
            port=args.port,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            timeout_graceful_shutdown=_DRAIN_S,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            ssl_ciphers=args.ssl_ciphers,
            h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
            h11_max_header_count=args.h11_max_header_count,
            **({} if log_config is None else {"log_config": log_config}),
        )
        return closing

    async def _app(self, engine: AsyncLLM) -> FastAPI:
        """Return vLLM's application, with routes for sessions if they were asked for."""
        tasks = await engine.get_supported_tasks()
        app: FastAPI = build_app(self.args, tasks, engine.model_config)
        setattr(app.state, PLUGIN_MARK, True)
        if self.options.enable_streaming:
            self.frontend = self.make_frontend(self.options.settings)
            self.frontend.attach(app)
        await init_app_state(engine, app.state, self.args, tasks)
        if self.frontend is not None:
            names = self.args.served_model_name or ()
            self.frontend.start(SessionEngine(engine, names, ChatFormat.from_flags(self.args)))
        return app

    async def _stop_sessions(self) -> None:
        """Close every session. Calling it again does nothing."""
        frontend, self.frontend = self.frontend, None
        if frontend is not None:
            await frontend.stop()


def expect_the_end() -> None:
    """Let vLLM's front end not write the end of its engine, from now on, as an error with a traceback.

    For a program that has told its engine to stop, and ends after it. vLLM closes its queue before it cancels the task
    that reads from it; where the task wakes in between, it takes that for the engine's death.
    """
    logging.getLogger(StockAsyncLLM.__module__).addFilter(_is_no_end)


def _is_no_end(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], EngineDeadError))


def _give_up(number: int, _frame: object) -> None:
    # Not KeyboardInterrupt: vLLM drops one that comes while it shakes hands with its engine, and then waits for ever.
    raise SystemExit(128 + number)

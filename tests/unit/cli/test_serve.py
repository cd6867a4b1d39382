"""``kvpolicy serve`` before there is an engine: its help, its flags, and what it says without vLLM."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import fields
from typer.testing import CliRunner

from kvpolicy import serving
from kvpolicy.adapters.http.settings import ServerSettings
from kvpolicy.adapters.vllm.shared.serve_options import ServeOptions
from kvpolicy.cli.app import app
from kvpolicy.serving import SERVE_FLAGS
from tests.pages import ROOT, makefile_flags


def taken(*arguments: str) -> tuple[ServeOptions, tuple[str, ...], dict[str, Any]]:
    """Return our options, what is wrong with them, and what is left for vLLM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port")
    SERVE_FLAGS.add_to(parser)
    namespace = parser.parse_args(arguments)
    return *SERVE_FLAGS.take(namespace), vars(namespace)


def parsed(*arguments: str) -> tuple[ServeOptions, dict[str, Any]]:
    """Return our options, with which nothing is wrong, and what is left for vLLM."""
    options, reasons, rest = taken(*arguments)
    assert reasons == ()
    return options, rest


def test_no_flag_of_ours_is_the_stock_server() -> None:
    options, rest = parsed("--port", "1")
    assert options == ServeOptions(settings=ServerSettings())
    assert options.is_stock
    assert rest == {"port": "1"}


def test_what_is_ours_is_taken_and_the_rest_is_vllms() -> None:
    flags = "--port 1 --enable-streaming --max-sessions 3 --kv-cache-policy randkv --session-idle-timeout-s 1.5"
    options, rest = parsed(*flags.split(), "--session-max-body-bytes=1000")
    assert options == ServeOptions(
        kv_cache_policy="randkv",
        enable_streaming=True,
        max_sessions=3,
        settings=ServerSettings(idle_timeout_s=1.5, max_body_bytes=1000),
    )
    assert not options.is_stock
    assert rest == {"port": "1"}
    assert not parsed("--kv-cache-policy", "off")[0].is_stock


def test_every_limit_has_a_flag_that_is_explained() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"])
    assert result.exit_code == 0
    for field in fields(ServerSettings):
        if field.name != "max_sessions":
            assert f"--session-{field.name.replace('_', '-')} " in result.output
    assert "--max-sessions " in result.output
    assert "longest body of a request. Unset: 8388608." in " ".join(result.output.split())
    assert "every flag of 'vllm serve'" in result.output.lower()


def test_all_reasons_come_at_once_and_name_the_flag() -> None:
    flags = ("--max-sessions", "3", "--session-idle-timeout-s", "-1", "--session-max-body-bytes", "0")
    options, reasons, rest = taken(*flags)
    assert [reason.split(":")[0] for reason in reasons] == [
        "--max-sessions",
        "--session-max-body-bytes",
        "--session-idle-timeout-s",
        "--session-max-body-bytes",
        "--session-idle-timeout-s",
    ]
    assert "add --enable-streaming" in reasons[0]
    # What can be known of the engine is asked with these, to be said beside them.
    assert options == ServeOptions(max_sessions=3, settings=ServerSettings())
    assert rest == {"port": None}


def test_a_limit_that_may_be_none_can_be_set_to_it() -> None:
    options, _ = parsed("--enable-streaming", "--session-max-inflight-bytes", "none")
    assert options.settings.max_inflight_bytes is None


@pytest.mark.parametrize("value", ["many", "none"])
def test_a_value_of_the_wrong_type_is_said_by_the_parser(capsys: pytest.CaptureFixture[str], value: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed("--session-max-body-bytes", value)
    assert caught.value.code == 2
    assert f"--session-max-body-bytes: invalid int value: '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_missing_vllm_is_one_line(command: str) -> None:
    result = CliRunner().invoke(app, [command, "a-model", "--dtype", "float32"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    said = result.output + str(result.exception)
    assert "the module 'vllm' is not installed; run: pip install 'kvpolicy[vllm]'" in said


def test_ctrl_c_before_the_server_is_ready_ends_it_with_the_status_of_that_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while vLLM is still being imported: 128 + 2, as every shell has it."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "adapter_package", lambda: "somewhere")
    monkeypatch.setattr(serving, "importlib", SimpleNamespace(import_module=interrupted))
    result = CliRunner().invoke(app, ["serve", "model"])
    assert result.exit_code == 130
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "left_out"),
    [
        ("", ()),
        ("--port 9000", ("--port",)),
        ("--port=9000 --max_num_seqs 4", ("--port", "--max-num-seqs")),
        ("--enforce-eager --session-top-p 0.5", ("--enforce-eager",)),
    ],
)
def test_make_serve_gives_no_flag_twice(arguments: str, left_out: tuple[str, ...]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-n", "serve", f"ARGS={arguments}"]
    done = subprocess.run(  # noqa: S603 - ours
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    )
    [line] = re.findall(r'kvpolicy serve "\$model" (.*)', done.stdout)
    usual = [flag for flag in makefile_flags("SERVE_FLAGS").split() if flag.partition("=")[0] not in left_out]
    assert line.split() == [*usual, *arguments.split()]
    assert len(usual) == len(makefile_flags("SERVE_FLAGS").split()) - len(left_out)

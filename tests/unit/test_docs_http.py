"""The pages on the HTTP API, beside the code: routes, bodies, codes, limits, metrics and log events."""

from __future__ import annotations

import argparse
import ast
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from attrs import fields_dict
from fastapi import FastAPI
from pydantic import BaseModel

from kvpolicy.adapters.http import log, metrics, schemas
from kvpolicy.adapters.http.end_reasons import Ending, EndReason
from kvpolicy.adapters.http.frontend import SessionFrontend
from kvpolicy.adapters.http.settings import ServerSettings
from kvpolicy.serving import SERVE_FLAGS
from tests.pages import (
    DOCS,
    ROOT,
    answer_after,
    first_names,
    makefile_flags,
    names,
    rows,
    section,
    server_blocks,
    server_pages,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

API, SERVER = DOCS / "reference" / "http-api.md", DOCS / "reference" / "http-server.md"
HTTP = ROOT / "src" / "kvpolicy" / "adapters" / "http"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    app = FastAPI()
    SessionFrontend(ServerSettings()).attach(app)
    return app.openapi()


def calls() -> Iterator[ast.Call]:
    """Yield every call in the source of the frontend."""
    for path in HTTP.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def properties(schema: dict[str, Any], path: str, kind: str) -> dict[str, Any]:
    """Return the properties of a request's body."""
    content = schema["paths"][path]["post"]["requestBody"]["content"]
    found: dict[str, Any] = content[kind]["schema"]["properties"]
    return found


# -- routes and bodies


def test_routes(schema: dict[str, Any]) -> None:
    documented = {names(row[0])[0]: row[2] for row in rows(API, "Routes")}
    real = {
        f"{method.upper()} {path}": next(status for status in operation["responses"] if status < "300")
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    }
    assert documented == real


def fields_of(heading: str) -> list[str]:
    """Return what the rows of a section are about, content types left out."""
    return [name for row in rows(API, heading) for name in names(row[0]) if "/" not in name]


def test_fields_of_requests(schema: dict[str, Any]) -> None:
    sessions = "/v1/streaming/sessions"
    wanted = properties(schema, sessions, "application/json")
    turn = properties(schema, f"{sessions}/{{session_id}}/frame", "application/json")
    assert fields_of("Open") == [*wanted, *schemas.OpenReply.model_fields]
    assert fields_of("Push") == [*turn, *schemas.FrameReply.model_fields]
    assert fields_of("Status") == list(schemas.StatusReply.model_fields)


def test_defaults_of_requests() -> None:
    documented = {names(row[0])[0]: row[1] for row in rows(API, "Open")[:5] + rows(API, "Push")[5:9]}
    real = {}
    for model in (schemas.OpenRequest, schemas.FrameTurn):
        for name, field in model.model_fields.items():
            value = field.get_default(call_default_factory=True)
            if isinstance(value, BaseModel):
                value = value.model_dump(exclude_unset=True)
            real[name] = "" if field.is_required() else json.dumps(value)
    # Both requests have a field of the name "sampling": the second table's stands, here as there.
    assert documented == real


def test_kinds_of_bodies(schema: dict[str, Any]) -> None:
    content = schema["paths"]["/v1/streaming/sessions/{session_id}/frame"]["post"]["requestBody"]["content"]
    assert [name for name in first_names(API, "Push") if "/" in name] == list(content)
    [form] = [row for row in rows(API, "Push") if "`multipart/form-data`" in row[0]]
    assert names(form[1]) == list(content["multipart/form-data"]["schema"]["properties"])


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("Sampling", schemas.SamplingOptions),
        ("Close", schemas.CloseReply),
        ("Config", schemas.ConfigReply),
    ],
)
def test_fields_in_sentences(heading: str, model: type[BaseModel]) -> None:
    assert [name for name in names(section(API, heading)) if name.islower()] == list(model.model_fields)


def test_the_fields_of_a_segment_and_of_an_error() -> None:
    [row] = [row for row in rows(API, "Status") if "`segments`" in row[0]]
    assert names(row[1]) == list(schemas.SegmentBody.model_fields)
    first, _ = section(SERVER, "Codes").split("(everything", 1)
    assert names(first) == ["error", *schemas.ErrorDetail.model_fields]


# -- codes


def real_statuses() -> dict[str, set[int]]:
    """Return the statuses that each code of the frontend's own can come with."""
    makers = {"bad_request": 400, "too_large": 413, "conflict": 409, "unavailable": 503}
    found: dict[str, set[int]] = {}
    for call in calls():
        arguments = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
        match call.func, arguments:
            case ast.Name("ApiError" | "_from_core"), [int(status), str(code), *_]:
                found.setdefault(code, set()).add(status)
            case ast.Name(maker), [str(code), *_] if maker in makers:
                found.setdefault(code, set()).add(makers[maker])
    for reason in EndReason:
        ending = Ending(reason, ("",))
        found[ending.error().code] = {ending.error().status, ending.pending_error().status}
    return found


def test_codes() -> None:
    documented = {names(row[0])[0]: {int(status) for status in row[1].split(", ")} for row in rows(SERVER, "Codes")}
    real = real_statuses()
    assert set(documented) == set(real)
    for code, statuses in documented.items():
        assert statuses <= real[code], code
        # What ends a session in mid-push may be answered with another code first.
        assert code.startswith("ended_") or statuses == real[code], code


# -- limits, metrics, log


def test_limits() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    SERVE_FLAGS.add_to(parser)
    flags = [action.option_strings[0] for action in parser._actions]
    documented = {names(row[0])[0]: row[1] for row in rows(SERVER, "Limits")}
    assert list(documented) == [flag for flag in flags if flag not in {"--kv-cache-policy", "--enable-streaming"}]
    settings = ServerSettings()
    for name in fields_dict(ServerSettings):
        if name != "max_sessions":
            assert documented[f"--session-{name.replace('_', '-')}"] == str(getattr(settings, name))


def test_every_setting_is_explained_by_itself() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    SERVE_FLAGS.add_to(parser)
    for action in parser._actions:
        assert "see there" not in str(action.help)
        assert len(str(action.help)) > 30


def test_metrics() -> None:
    documented = [(*names(row[0]), row[1], names(row[2])) for row in rows(SERVER, "Metrics")]
    real = []
    for collector in metrics._collectors().values():
        [family] = collector.describe()
        name = f"{family.name}_total" if family.type == "counter" else family.name
        real.append((name, family.type, [label for label in collector._labelnames if label != "model_name"]))
    assert documented == real
    [states] = [row[3] for row in rows(SERVER, "Metrics") if "session_open" in row[0]]
    assert all(state in states for state in metrics.STATES)


def test_log_events() -> None:
    constants = {name: value for name, value in vars(log).items() if name.isupper() and name[0] != "_"}
    written: dict[str, tuple[str, set[str]]] = {}
    for call in calls():
        if (
            isinstance(call.func, ast.Attribute)
            and call.args
            and ast.unparse(call.args[0]).removeprefix("events.") in constants
        ):
            name = constants[ast.unparse(call.args[0]).removeprefix("events.")]
            written[name] = (call.func.attr, {keyword.arg for keyword in call.keywords if keyword.arg})
    documented = {names(row[0])[0]: (row[1], set(names(row[2])) - {"session"}) for row in rows(SERVER, "Log events")}
    assert documented == written
    assert names(section(SERVER, "Log events"))[0] == log._LOGGER


# -- commands


def test_the_pages_with_commands_for_the_server() -> None:
    found = server_pages()
    assert {ROOT / "README.md", DOCS / "tutorials" / "first-http-session.md"} <= set(found)
    languages = {block.language for page in found for block in server_blocks(page)}
    assert languages == {"sh", "python"}
    assert any(answer_after(block) is not None for page in found for block in server_blocks(page))


def test_the_flags_of_make_serve_are_those_of_the_pages() -> None:
    flags = makefile_flags("SERVE_FLAGS")
    assert re.search(r"--host=127\.0\.0\.1 --port=8000 ", flags)
    assert "--served-model-name=smollm2 " in flags
    assert "--enable-streaming " in flags

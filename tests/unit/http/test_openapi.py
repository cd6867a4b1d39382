"""The OpenAPI schema, and requests made from it at random: whatever comes, the server has an answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
from attrs import evolve
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpolicy.adapters.http.frontend import SessionFrontend
from kvpolicy.adapters.http.settings import ServerSettings
from tests.fakes.session_engine import FACTS, FakeEngine
from tests.unit.http.serving import SESSIONS, loopback, served

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOMY = evolve(FACTS, num_pool_blocks=10**9, max_sessions=10**6)


def _schema() -> dict[str, Any]:
    app = FastAPI()
    SessionFrontend(ServerSettings()).attach(app)
    return app.openapi()


def test_the_schema_has_the_routes_and_says_what_they_do() -> None:
    schema = _schema()
    assert sorted(schema["paths"]) == [
        "/v1/streaming/config",
        "/v1/streaming/sessions",
        "/v1/streaming/sessions/{session_id}",
        "/v1/streaming/sessions/{session_id}/frame",
    ]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert len(operation["description"]) > 60, where
            assert "X-Session-ID" in [parameter["name"] for parameter in operation["parameters"]], where
            # Whether it is asked for depends on the server's --api-key.
            assert operation["security"] == [{"api_key": []}, {}], where
            for status, answer in operation["responses"].items():
                if status >= "400":
                    content = answer["content"]["application/json"]["schema"]
                    assert content == {"$ref": "#/components/schemas/ErrorBody"}, (where, status)
    schemes = schema["components"]["securitySchemes"]
    assert {name: (each["type"], each["scheme"]) for name, each in schemes.items()} == {"api_key": ("http", "bearer")}
    push = schema["paths"]["/v1/streaming/sessions/{session_id}/frame"]["post"]
    assert sorted(push["requestBody"]["content"]) == [
        "application/json",
        "image/jpeg",
        "image/png",
        "multipart/form-data",
        "text/plain",
    ]
    assert "text/event-stream" in push["responses"]["200"]["content"]
    assert sorted(push["responses"]) == ["200", "400", "404", "409", "413", "422", "500", "503"]
    assert "$defs" not in json.dumps(schema)
    assert "HTTPValidationError" not in schema["components"]["schemas"]


async def test_routes_that_are_not_started_say_so() -> None:
    app = FastAPI()
    SessionFrontend(ServerSettings()).attach(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = await http.post(SESSIONS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "starting")
        assert answer.headers["retry-after"] == "1"


async def test_the_servers_other_routes_keep_their_own_ways() -> None:
    async with served() as server:
        answer = await server.http.get("/nothing", headers={"X-Session-ID": "k"})
        assert answer.json() == {"detail": "Not Found"}
        assert "x-session-id" not in answer.headers


api = schemathesis.openapi.from_dict(_schema())


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with loopback(FakeEngine(ROOMY), reply_deadline_s=60) as address:
        yield address


@pytest.fixture(scope="module")
def session_id(address: str) -> str:
    return str(httpx.post(address + SESSIONS, timeout=60).json()["session_id"])


@pytest.fixture(scope="module")
def statuses() -> list[int]:
    """Collect the statuses of all answers."""
    return []


@api.parametrize()
@settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
def test_requests_made_from_the_schema_get_an_answer_that_it_names(
    case: schemathesis.Case[Any], address: str, session_id: str, statuses: list[int]
) -> None:
    # Every other one is for a session that there is. Another may have closed it, which is an answer, too.
    if "session_id" in case.path_parameters and case.method != "DELETE" and len(statuses) % 2:
        case.path_parameters["session_id"] = session_id
    response = case.call(base_url=address, timeout=60)
    statuses.append(response.status_code)
    checks = schemathesis.checks
    names = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
    case.validate_response(response, checks=[getattr(checks, name) for name in names])


def test_not_all_of_them_were_refused(statuses: list[int]) -> None:
    if len(statuses) < 100:
        pytest.skip("only a part of the requests was made in this run")
    assert {200, 201, 400, 404, 422} <= set(statuses)
    assert max(statuses) < 500


@given(
    body=st.binary(max_size=300),
    kind=st.sampled_from(["text/plain", "application/json", "image/png", "multipart/form-data; boundary=b"]),
    head=st.sampled_from(
        [
            b"",
            b"--b\r\nContent-Disposition: form-data; name=",
            b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\n',
        ]
    ),
    tail=st.sampled_from([b"", b"\r\n--b--\r\n"]),
)
@settings(max_examples=40)
async def test_no_body_makes_it_fail(body: bytes, kind: str, head: bytes, tail: bytes) -> None:
    async with served() as server:
        path = await server.open()
        answer = await server.http.post(f"{path}/frame", content=head + body + tail, headers={"Content-Type": kind})
        assert answer.status_code in {200, 400, 422}, answer.text

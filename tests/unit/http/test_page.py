"""The console page: where it lies, and what keeps other hosts out of it."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from tests.unit.http.serving import served

STATIC = files("kvpolicy.adapters.http").joinpath("static")
PARTS = {
    "console": "text/html; charset=utf-8",
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "console-api.js": "text/javascript; charset=utf-8",
    "console-draw.js": "text/javascript; charset=utf-8",
    "console-turns.js": "text/javascript; charset=utf-8",
}


@pytest.mark.parametrize("prefix", ["/v1/streaming", "/streaming"])
async def test_every_part_is_served_and_allows_this_server_only(prefix: str) -> None:
    async with served() as server:
        for path, kind in PARTS.items():
            answer = await server.http.get(f"{prefix}/{path}")
            assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
            policy = answer.headers["content-security-policy"].split("; ")
            for rule in ("default-src", "base-uri", "form-action", "frame-ancestors"):
                assert f"{rule} 'none'" in policy
            for rule in ("script-src", "style-src", "connect-src"):
                assert f"{rule} 'self'" in policy
            sources = {source for rule in policy for source in rule.split()[1:]}
            assert sources == {"'none'", "'self'", "blob:", "data:"}
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cache-control"] == "no-cache"
        assert (await server.http.get(f"{prefix}/console.svg")).status_code == 404
        assert "/console" not in str(server.app.openapi()["paths"])


def test_the_parts_are_all_there_is_and_name_no_other_host() -> None:
    found = {file.name: file.read_text(encoding="utf-8") for file in STATIC.iterdir()}
    assert set(found) == {*PARTS, "console.html"} - {"console"}
    addresses = {address for text in found.values() for address in re.findall(r"\w*:?//[\w.]+[^\s\"']*", text)}
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of the SVG language is no address to be asked"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", "".join(found.values()))

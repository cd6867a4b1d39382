"""An expected failure names what it expects, so that an error of its set-up never counts as one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TOO_BROAD = {"Exception", "BaseException"}


def unnamed(source: str) -> list[int]:
    """Return the lines of expected failures that do not say by ``raises=`` what they expect, or say anything at all."""
    tree = ast.parse(source)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    marks = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "xfail"]
    lines = [mark.lineno for mark in marks if not _names_one(calls.get(id(mark)))]
    broad = [
        keyword.value.lineno
        for call in calls.values()
        for keyword in call.keywords
        if keyword.arg == "raises" and TOO_BROAD & {n.id for n in ast.walk(keyword.value) if isinstance(n, ast.Name)}
    ]
    return sorted(lines + broad)


def _names_one(call: ast.Call | None) -> bool:
    return call is not None and any(keyword.arg == "raises" for keyword in call.keywords)


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_every_expected_failure_names_its_exception(path: Path) -> None:
    assert unnamed(path.read_text(encoding="utf-8")) == []


def test_those_that_name_none_are_found() -> None:
    source = """
mark = pytest.mark.xfail
bare = pytest.mark.xfail(reason="why", strict=True)
good = pytest.mark.xfail(reason="why", raises=TimeoutError)
broad = pytest.mark.xfail(reason="why", raises=(OSError, Exception))
at_once = pytest.xfail("why")
through = only_ours_passes("why", raises=BaseException)
"""
    assert unnamed(source) == [2, 3, 5, 6, 7]

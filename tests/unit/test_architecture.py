"""The map of the code: every path that it names exists, and every question is answered by a name that is there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.pages import DOCS, ROOT, names, rows

PAGE = DOCS / "explanation" / "architecture.md"
PACKAGE = ROOT / "src" / "kvpolicy"
QUESTIONS = rows(PAGE, "Where is ...?")


def test_every_path_on_the_page_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    paths = re.findall(r"[a-z0-9_]+(?:/[a-z0-9_]+)*(?:/(?![a-z])|\.py\b)", text)
    assert len(paths) > 40
    assert [path for path in paths if not (PACKAGE / path).exists()] == []


def test_every_folder_of_the_package_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rooms = [PACKAGE / "adapters" / "vllm" / "v0_28", PACKAGE]
    folders = [folder for room in rooms for folder in room.iterdir() if (folder / "__init__.py").exists()]
    assert [folder.name for folder in folders if f"{folder.name}/" not in text] == []


@pytest.mark.parametrize("row", QUESTIONS, ids=[names(row[0])[0] for row in QUESTIONS])
def test_every_question_leads_to_a_name(row: list[str]) -> None:
    name, file = names(row[0])[0], names(row[1])[0]
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    annotated = (node.target for node in tree.body if isinstance(node, ast.AnnAssign))
    defined |= {target.id for target in annotated if isinstance(target, ast.Name)}
    assert name in defined

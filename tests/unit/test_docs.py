"""The documentation: its links, its tables beside the code, its generated parts, and what runs without an engine."""

from __future__ import annotations

import ast
import re
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import attrs
import pytest

import kvpolicy
from kvpolicy.core import errors, events
from kvpolicy.core.budget import RetentionBudget
from kvpolicy.core.policies import RandKV, SinkWindow
from kvpolicy.core.replies import Reply, SessionStats
from kvpolicy.core.states import SessionState
from tests.pages import (
    DOCS,
    ROOT,
    anchors,
    blocks,
    first_names,
    generated,
    links,
    names,
    pages,
    python_blocks,
    python_pages,
    rows,
)

if TYPE_CHECKING:
    from pathlib import Path

REFERENCE = DOCS / "reference"
ADAPTER = ROOT / "src" / "kvpolicy" / "adapters" / "vllm" / "v0_28"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def class_fields(module: str, owner: str) -> list[str]:
    """Return the annotated names of a class in an adapter module, which is read and not imported."""
    tree = ast.parse((ADAPTER / module).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    return [
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


# -- the Python that needs no engine


@pytest.mark.parametrize("page", python_pages(engine=False), ids=name_of)
def test_python_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module, as a reader would have it: what a page defines can then be pickled.
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    for block in python_blocks(page):
        if block.is_doctest:
            block.run_doctest(namespace)
        else:
            exec(block.compiled(), namespace)  # noqa: S102 - our own text


def test_every_kind_of_page_has_python_that_runs() -> None:
    kinds = {page.parent.name for page in python_pages(engine=False) + python_pages(engine=True)}
    assert {"tutorials", "howto", "reference", "explanation"} <= kinds
    assert ROOT / "README.md" in python_pages(engine=True)


# -- links, size, generated parts


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for line, target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{name_of(page)}:{line}: {target} does not exist"
        assert not anchor or anchor in anchors(goal), f"{name_of(page)}:{line}: {target} has no such heading"


def test_every_page_can_be_reached_from_the_index() -> None:
    index = DOCS / "index.md"
    reached = {(index.parent / target.partition("#")[0]).resolve() for _, target in links(index)}
    assert set(DOCS.rglob("*.md")) - {index} == reached


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 120


def test_generated_parts_are_up_to_date() -> None:
    for path, text in generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{name_of(path)} is out of date; run: python -m tests.pages"


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    commands = ast.parse((ROOT / "src" / "kvpolicy" / "cli" / "app.py").read_text(encoding="utf-8"))
    ours = {node.name for node in commands.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    for page in pages():
        shell = "\n".join(block.code for block in blocks(page) if block.language == "sh")
        text = shell + "\n".join(re.findall(r"`(make [^`]+|kvpolicy [^`]+)`", page.read_text(encoding="utf-8")))
        assert set(re.findall(r"\bmake ([a-z]+)", text)) <= targets, name_of(page)
        assert set(re.findall(r"\bkvpolicy ([a-z]+)", text)) <= ours, name_of(page)


def test_the_configuration_of_the_router_is_shown_as_it_is() -> None:
    [shown] = [block for block in blocks(DOCS / "howto" / "scale-out.md") if block.language == "nginx"]
    assert shown.code == (DOCS / "howto" / "nginx-sessions.conf").read_text(encoding="utf-8")


# -- tables beside the code


def test_budget_keys_and_defaults() -> None:
    fields = attrs.fields_dict(RetentionBudget)
    documented = {names(row[0])[0]: names(row[2])[0] for row in rows(REFERENCE / "budgets.md")}
    assert documented == {name: repr(field.default) for name, field in fields.items()}


@pytest.mark.parametrize("value", [Reply, SessionStats], ids=lambda value: value.__name__)
def test_fields_of_values(value: type) -> None:
    assert first_names(REFERENCE / "reply.md", value.__name__) == list(attrs.fields_dict(value))


def test_fields_of_the_report() -> None:
    assert first_names(REFERENCE / "reply.md", "ChunkReport") == class_fields("wire.py", "ChunkReport")


def test_error_classes() -> None:
    documented = {}
    for row in rows(REFERENCE / "errors-and-codes.md", "Classes"):
        documented[names(row[0])[0]] = names(row[1])
    classes = [value for value in vars(errors).values() if isinstance(value, type) and value.__name__[0] != "_"]
    public = [value for value in classes if issubclass(value, errors.KVPolicyError)]
    assert list(documented) == [value.__name__ for value in public]
    for value in public:
        assert getattr(kvpolicy, value.__name__) is value
        mro = [base.__name__ for base in value.__mro__]
        assert all(base in mro for base in documented[value.__name__])


def test_every_code_is_documented() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    used = set(re.findall(r'(?:(?:Refuse|SessionFailedError|ChunkRefusedError)\(\s*|STOP_PREFIX \+ )"(\w+)"', text))
    assert set(first_names(REFERENCE / "errors-and-codes.md", "Codes")) == used


def test_every_event_is_documented() -> None:
    documented = {
        names(row[0])[0]: (names(row[1])[0], names(row[3])) for row in rows(REFERENCE / "events.md", "Events")
    }
    expected = {
        kind.name: (kind.__name__, [field.name for field in attrs.fields(kind) if field.name != "request_id"])
        for kind in events.Event.__subclasses__()
    }
    assert documented == expected


def test_the_log_levels_of_events() -> None:
    tree = ast.parse((ADAPTER / "log.py").read_text(encoding="utf-8"))
    (levels,) = (
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    )
    special = {
        ast.unparse(key): ast.unparse(value).rpartition(".")[2].lower()
        for key, value in zip(levels.keys, levels.values, strict=True)
        if key is not None
    }
    for row in rows(REFERENCE / "events.md", "Events"):
        assert row[2] == special.get(names(row[1])[0], "info")


def test_every_fault_is_documented() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in ADAPTER.glob("*.py"))
    assert set(first_names(REFERENCE / "events.md", "Faults")) == set(re.findall(r'log_fault\("([^"]+)"', text))


def test_every_guard_is_documented() -> None:
    """What the messages of guards.py name, beside what the page names."""
    text = (ADAPTER / "guards.py").read_text(encoding="utf-8")
    page = REFERENCE / "guards.md"
    configuration, rest = text.split("def cache_errors", 1)
    cache, sampling = rest.split("def sampling_errors", 1)
    flag = r'f?"(--[a-z0-9-]+|VLLM_[A-Z0-9_]+)[: ]'
    assert first_names(page, "Engine configuration") == re.findall(rf"\n?[ (]{flag}", configuration)
    assert set(first_names(page, "The model's KV cache")) == set(re.findall(flag, cache))
    assert first_names(page, "Sampling parameters of a session's chunk") == list(
        dict.fromkeys(re.findall(r"sampling_params\.(\w+):", sampling))
    )
    ours = (ADAPTER / "engine_args.py").read_text(encoding="utf-8").split("ours = {", 1)[1].split("}", 1)[0]
    assert first_names(page, "Engine arguments that kvpolicy sets") == re.findall(r'"(\w+)":', ours)


def test_every_guard_of_requests_is_documented() -> None:
    text = (ADAPTER / "request_guards.py").read_text(encoding="utf-8")
    looked_at = set(re.findall(r"\b(?:params|request)\.((?:min|prompt)_\w+|\w+_token_ids|logit_bias)", text))
    named = {name for name in first_names(REFERENCE / "request-guards.md", "What is refused") if "_" in name}
    assert named == looked_at - {"prompt_token_ids", "all_stop_token_ids"}


def test_every_guard_of_the_server_is_documented() -> None:
    text = (ADAPTER / "server_guards.py").read_text(encoding="utf-8")
    named = re.findall(r'f?"(--[a-z0-9-]+|VLLM_[A-Z0-9_]+)[: ]', text)
    assert first_names(REFERENCE / "guards.md", "The server") == named


def test_every_option_and_counter_of_policies_is_documented() -> None:
    page = REFERENCE / "kv-cache-policy.md"
    for section, policy in (("randkv", RandKV), ("sink_window", SinkWindow)):
        assert first_names(page, section) == [attribute.name for attribute in attrs.fields(policy)]
        for row in rows(page, section):
            assert row[1].strip('"') == str(getattr(policy(), names(row[0])[0]))
    wire = (ADAPTER / "wire.py").read_text(encoding="utf-8").split("class CompactionResult:", 1)[1].split("def ", 1)[0]
    assert first_names(page, "Result") == re.findall(r"^    (\w+): int$", wire, re.MULTILINE)
    counters = re.findall(r'"(\w+)": \("([\w:]+)"', (ADAPTER / "metrics.py").read_text(encoding="utf-8"))
    assert [(names(row[1])[0], names(row[0])[0]) for row in rows(page, "Metrics")] == counters


def test_every_state_is_explained() -> None:
    assert first_names(REFERENCE / "states.md") == [state.value for state in SessionState]

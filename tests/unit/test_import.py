"""``import kvpolicy`` is cheap and has no effect; the core imports the standard library and attrs only."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvpolicy

PACKAGE = Path(kvpolicy.__file__).parent
CORE_MODULES = sorted((PACKAGE / "core").glob("*.py"))
ALLOWED = {
    "__future__",
    "attrs",
    "collections.abc",
    "enum",
    "hashlib",
    "json",
    "kvpolicy.core",
    "math",
    "re",
    "types",
    "typing",
}
HEAVY = {"torch", "vllm", "structlog", "numpy", "pydantic", "transformers", "triton", "fastapi"}

SCRIPT = """
import os, sys
before, environment, folder = set(sys.modules), dict(os.environ), os.getcwd()
import {module}
assert dict(os.environ) == environment and os.getcwd() == folder
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
"""


def loaded_by(module: str) -> set[str]:
    """Return the top-level modules that importing ``module`` loads in a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-W", "error", "-c", SCRIPT.format(module=module)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["kvpolicy", "kvpolicy.testing"])
def test_importing_kvpolicy_loads_attrs_and_the_standard_library(module: str) -> None:
    loaded = loaded_by(module)
    assert not loaded & HEAVY
    assert loaded - sys.stdlib_module_names == {"attr", "attrs", "kvpolicy"}


@pytest.mark.parametrize("path", CORE_MODULES, ids=lambda path: path.stem)
def test_a_core_module_imports_only_what_is_allowed(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name in ALLOWED or name.startswith("kvpolicy.core."), f"{path.name} imports {name}"


def test_every_public_name_exists() -> None:
    assert len(set(kvpolicy.__all__)) == len(kvpolicy.__all__)
    for name in kvpolicy.__all__:
        assert hasattr(kvpolicy, name), name


def test_the_version_is_that_of_the_project() -> None:
    project = PACKAGE.parents[1] / "pyproject.toml"
    if not project.exists():
        pytest.skip("an installed package has no pyproject.toml beside it")
    assert tomllib.loads(project.read_text())["project"]["version"] == kvpolicy.__version__


def test_the_only_entry_point_in_vllm_is_one_that_it_leaves_alone() -> None:
    """VLLM loads endpoint plugins by name only (``VLLM_PLUGINS``), and everything else in every engine."""
    project = PACKAGE.parents[1] / "pyproject.toml"
    if not project.exists():
        pytest.skip("an installed package has no pyproject.toml beside it")
    groups = tomllib.loads(project.read_text())["project"]["entry-points"]
    assert list(groups) == ["vllm.endpoint_plugins"]
    for value in groups["vllm.endpoint_plugins"].values():
        module, _, name = value.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()

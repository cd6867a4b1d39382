"""Print files and lines of every part: what a new version of vLLM has to write, and what it does not touch."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "kvpolicy"
ADAPTER = PACKAGE / "adapters" / "vllm"


def counts(folder: Path) -> tuple[int, int, str]:
    """Return files and lines of a folder, and its longest file with its lines."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py")}
    longest = max(lines, key=lambda path: lines[path])
    return len(lines), sum(lines.values()), f"{longest.relative_to(folder)} {lines[longest]}"


def show(title: str, folders: list[Path]) -> None:
    """Print a table of folders with its sum."""
    print(f"{title}\n  {'folder':38}{'files':>6}{'lines':>8}  longest")
    rows = [(str(folder.relative_to(PACKAGE)), *counts(folder)) for folder in folders]
    for name, num_files, num_lines, longest in rows:
        print(f"  {name:38}{num_files:>6}{num_lines:>8}  {longest}")
    print(f"  {'all':38}{sum(row[1] for row in rows):>6}{sum(row[2] for row in rows):>8}\n")


def main() -> None:
    """Print both tables."""
    versions = sorted(ADAPTER.glob("v[0-9]*"))
    rooms = [room for version in versions for room in sorted(version.iterdir()) if (room / "__init__.py").exists()]
    show("A new version of vLLM writes", rooms)
    others = [PACKAGE / name for name in ("core", "kernels", "adapters/http", "client", "cli", "bench", "testing")]
    show("It does not touch", [ADAPTER / "shared", *others])


if __name__ == "__main__":
    main()

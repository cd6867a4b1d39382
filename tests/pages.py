"""The documentation as data: pages, their code blocks and links, and the parts of it that are generated.

``python -m tests.pages`` writes the generated parts anew. How a page's Python is run: ``docs/index.md``.
"""

from __future__ import annotations

import doctest
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from kvpolicy.core.fold import DropTail, Evict
from kvpolicy.core.segments import SegmentKind, SegmentLog
from kvpolicy.core.states import TRANSITIONS, SessionState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

    from kvpolicy.core.fold import ChunkShape, FoldPlan
    from kvpolicy.core.ledger import SessionLedger

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STATES_PAGE = DOCS / "reference" / "states.md"
PICTURE = DOCS / "explanation" / "one-fold.svg"
WORKED_EXAMPLE = DOCS / "explanation" / "how-a-session-stays-bounded.md"
# A block that imports one of these runs on the engine, or with a server.
_ENGINE_NAMES = ("vllm", "kvpolicy.adapters")
_SERVER_NAMES = ("kvpolicy.client",)
# Where the pages' server listens.
ADDRESS = "127.0.0.1:8000"


@frozen
class Block:
    """One fenced block of a page; ``line`` is the line of its first code line."""

    page: Path
    line: int
    language: str
    code: str

    @property
    def is_doctest(self) -> bool:
        """Whether it is a dialogue whose answers are compared."""
        return self.code.startswith(">>> ")

    def run_doctest(self, namespace: dict[str, Any]) -> None:
        """Run a dialogue in a page's namespace.

        Raises:
            AssertionError: an answer differs.
        """
        name = str(self.page.relative_to(ROOT))
        test = doctest.DocTestParser().get_doctest(self.code, namespace, name, name, self.line - 1)
        report: list[str] = []
        runner = doctest.DocTestRunner(verbose=False)
        if runner.run(test, out=report.append, clear_globs=False).failed:
            raise AssertionError("".join(report))
        namespace.update(test.globs)

    def compiled(self, flags: int = 0) -> CodeType:
        """Return the code, with the page's own line numbers in its tracebacks."""
        source = "\n" * (self.line - 1) + self.code
        code: CodeType = compile(source, str(self.page), "exec", flags=flags, dont_inherit=True)
        return code


def pages() -> list[Path]:
    """Return every page: the README, the changelog, the page for contributors, and all of docs/."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found: list[Block] = []
    fence, start = "", 0
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if fence and line.strip() == "```":
            found.append(Block(page, start + 1, fence, "\n".join(lines[start : number - 1]) + "\n"))
            fence = ""
        elif not fence and line.startswith("```"):
            fence, start = line.removeprefix("```").strip() or "text", number
    if fence:
        raise ValueError(f"{page}: the block that begins in line {start} has no end")
    return found


def python_pages(*, engine: bool) -> list[Path]:
    """Return the pages with Python blocks that need an engine, or those with Python blocks that need none."""
    found = []
    for page in pages():
        code = python_blocks(page)
        if code and not _imports(code, _SERVER_NAMES) and _imports(code, _ENGINE_NAMES) is engine:
            found.append(page)
    return found


def server_pages() -> list[Path]:
    """Return the pages whose commands talk to the server of ``make serve``."""
    return [page for page in pages() if any(ADDRESS in block.code for block in server_blocks(page))]


def server_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page that talk to a server: those that use curl, and Python with our client."""
    return [
        block
        for block in blocks(page)
        if (block.language == "sh" and "curl -" in block.code)
        or (block.language == "python" and _imports([block], _SERVER_NAMES))
    ]


def answer_after(block: Block) -> Block | None:
    """Return the answer that a page shows for a block's commands: the next block, if it is text or JSON."""
    later = [other for other in blocks(block.page) if other.line > block.line]
    return later[0] if later and later[0].language in {"json", "text"} else None


def _imports(code: list[Block], names: tuple[str, ...]) -> bool:
    return any(re.search(rf"(from|import) {name}\b", block.code) for block in code for name in names)


def python_blocks(page: Path) -> list[Block]:
    """Return the Python blocks of a page, in order."""
    return [block for block in blocks(page) if block.language == "python"]


def rows(page: Path, heading: str | None = None) -> list[list[str]]:
    """Return the cells of the table rows of a page (of one section), header lines left out."""
    lines = [line for line in section(page, heading).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def section(page: Path, heading: str | None) -> str:
    """Return the text under a heading of the second level, or all of a page."""
    text = page.read_text(encoding="utf-8")
    if heading is None:
        return text
    return re.split(r"^## ", text.split(f"## {heading}\n", 1)[1], flags=re.MULTILINE)[0]


def names(cell: str) -> list[str]:
    """Return what a text has in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def first_names(page: Path, heading: str | None = None) -> list[str]:
    """Return the first name of each row."""
    return [names(row[0])[0] for row in rows(page, heading)]


def makefile_flags(name: str) -> str:
    """Return the value of a variable of the Makefile, on one line."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (value,) = re.findall(rf"^{name} := (.*)$", text, flags=re.MULTILINE)
    return str(value)


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the target of every link outside code blocks."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            for target in re.findall(r"\]\(([^)\s]+)\)", line):
                yield number, target


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# -- generated parts


def state_diagram() -> str:
    """Return the session's life as a mermaid diagram, made from the table of transitions."""
    by_arrow: dict[tuple[SessionState, SessionState], list[str]] = defaultdict(list)
    for (source, event), target in TRANSITIONS.items():
        by_arrow[source, target].append(event.value)
    lines = ["stateDiagram-v2", f"    [*] --> {SessionState.OPENED.value}"]
    order = list(SessionState)
    for source, target in sorted(by_arrow, key=lambda arrow: (order.index(arrow[0]), order.index(arrow[1]))):
        lines.append(f"    {source.value} --> {target.value}: {', '.join(by_arrow[source, target])}")
    return "\n".join([*lines, f"    {SessionState.CLOSED.value} --> [*]"]) + "\n"


def worked_example() -> dict[str, Any]:
    """Run the explanation's worked example and return the names that it defines."""
    namespace: dict[str, Any] = {}
    for block in python_blocks(WORKED_EXAMPLE):
        block.run_doctest(namespace)
    return namespace


_COLOURS = {SegmentKind.ANCHOR: "#9ecae1", SegmentKind.CONTENT: "#8cc084", SegmentKind.REPLY: "#f2b56b"}
_SCALE, _LEFT, _HEIGHT, _PITCH = 4, 120, 26, 74


def fold_picture(before: SessionLedger, chunk: ChunkShape, plan: FoldPlan, block_size: int) -> str:
    """Return an SVG of a session before and after a fold: segments, block boundaries, what leaves."""
    cut: SessionLedger = before
    gone: list[tuple[int, int]] = []
    for step in plan.steps:
        if isinstance(step, DropTail):
            cut = before.reply_closed(step.keep)
        if isinstance(step, Evict):
            shift = sum(end - start for start, end in gone)
            gone.append((step.victims.freed.start + shift, step.victims.freed.end + shift))
    kept = plan.ledger.num_tokens
    width = _LEFT + _SCALE * max(cut.num_tokens, kept + chunk.max_tokens) + 20
    parts = [
        *_strip(0, "before the fold", cut.log, block_size),
        *(_shade(0, start, end) for start, end in gone),
        *_strip(1, "after the fold", plan.ledger.log, block_size),
        _box(1, kept, kept + chunk.max_tokens, "none", f"{chunk.max_tokens}"),
        *_legend(width),
    ]
    title = "A fold: tokens of a session before and after it, as segments in blocks"
    body = "\n".join(f"  {part}" for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {2 * _PITCH + 40}" role="img" '
        f'font-family="sans-serif" font-size="12">\n  <title>{title}</title>\n'
        f'  <rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _strip(row: int, label: str, log: SegmentLog, block_size: int) -> Iterator[str]:
    yield f'<text x="8" y="{_top(row) + 17}">{label}</text>'
    for segment in log.segments:
        text = f"{segment.kind.value} {segment.width}"
        yield _box(row, segment.start, segment.end, _COLOURS[segment.kind], text)
    for start in range(0, log.num_tokens + 1, block_size):
        x, bottom = _LEFT + _SCALE * start, _top(row) + _HEIGHT
        yield f'<path d="M{x} {bottom}v8" stroke="black"/><text x="{x}" y="{bottom + 19}" font-size="9">{start}</text>'


def _box(row: int, start: int, end: int, fill: str, text: str) -> str:
    x, width = _LEFT + _SCALE * start, _SCALE * (end - start)
    dash = ' stroke-dasharray="4 3"' if fill == "none" else ""
    # Room for about one letter in seven pixels.
    label = text if 7 * len(text) <= width else text.rsplit(maxsplit=1)[-1]
    return (
        f'<rect x="{x}" y="{_top(row)}" width="{width}" height="{_HEIGHT}" fill="{fill}" stroke="black"{dash}/>'
        f'<text x="{x + width / 2:g}" y="{_top(row) + 17}" text-anchor="middle">{label}</text>'
    )


def _shade(row: int, start: int, end: int) -> str:
    x, width = _LEFT + _SCALE * start, _SCALE * (end - start)
    return (
        f'<rect x="{x}" y="{_top(row) - 6}" width="{width}" height="{_HEIGHT + 12}" fill="#c0392b" '
        f'fill-opacity="0.35"/><text x="{x + width / 2:g}" y="{_top(row) - 10}" text-anchor="middle">'
        f"evicted: {start} to {end - 1}</text>"
    )


def _legend(width: int) -> Iterator[str]:
    yield (
        f'<text x="{width / 2:g}" y="{2 * _PITCH + 30}" text-anchor="middle" font-size="11">'
        "blue: anchor, green: content, orange: reply, dashed: headroom; ticks: block boundaries</text>"
    )


def _top(row: int) -> int:
    return 28 + row * _PITCH


def generated() -> dict[Path, str]:
    """Return the text of every page or picture that has a generated part, as it should be."""
    states = STATES_PAGE.read_text(encoding="utf-8")
    diagram = f"```mermaid\n{state_diagram()}```"
    example = worked_example()
    picture = fold_picture(example["ledger"], example["chunk"], example["plan"], example["limits"].block_size)
    return {
        STATES_PAGE: re.sub(r"```mermaid\n.*?```", lambda _: diagram, states, count=1, flags=re.DOTALL),
        PICTURE: picture,
    }


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")

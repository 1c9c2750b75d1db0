"""Reads the code blocks, links and API references of a Markdown page."""

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# A block in another language would be run by nobody: `sh`, `py` or `console` are written `bash` and `python`.
LANGUAGES = frozenset({"python", "bash", "yaml", "diff", "text", "math"})
MARKS = frozenset({"no-run", "fails"})

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
_REFERENCE = re.compile(r"^::: (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: The page, relative to the repository.
        line: Line of the opening fence.
        language: ``python``, ``bash``, ``yaml``, ``diff``, ``text`` or ``math``.
        mark: ``no-run`` (cannot be run in a test), ``fails`` (must end with the sentence of the next block) or empty.
        title: Name of the file that the block is, empty if it is none.
        text: What is in it.
    """

    page: str
    line: int
    language: str
    mark: str
    title: str
    text: str

    @property
    def place(self) -> str:
        """Page and line, for messages."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """README, CONTRIBUTING and every page of the documentation."""
    return [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def name(page: Path) -> str:
    """The path of a page in the repository."""
    return page.relative_to(REPOSITORY).as_posix()


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page, in order."""
    found: list[Block] = []
    opened: re.Match[str] | None = None
    start, content = 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence is not None:
                opened, start, content = fence, number, []
        elif fence is not None and fence["ticks"].startswith(opened["ticks"]) and not fence["info"].strip():
            found.append(_block(name(page), start, opened["info"], "\n".join(content)))
            opened = None
        else:
            content.append(line[len(opened["indent"]) :])
    if opened is not None:
        raise AssertionError(f"{name(page)}:{start}: a block that is never closed")
    return found


def _block(page: str, line: int, info: str, text: str) -> Block:
    title = _TITLE.search(info)
    words = _TITLE.sub("", info).strip(" {}").replace(".", " ").split()
    language, marks = (words[0] if words else ""), words[1:]
    if language not in LANGUAGES or len(marks) > 1 or not MARKS.issuperset(marks):
        raise AssertionError(
            f"{page}:{line}: expected a block of {', '.join(sorted(LANGUAGES))}, marked {' or '.join(sorted(MARKS))} "
            f"or not at all, got {info!r}"
        )
    return Block(page, line, language, marks[0] if marks else "", title[1] if title else "", text)


def prose(page: Path) -> str:
    """Returns a page without its fenced blocks."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def links(page: Path) -> list[str]:
    """Returns the targets of links and images that are no web addresses."""
    return [target for target in _LINK.findall(prose(page)) if "://" not in target and not target.startswith("mailto:")]


def references(page: Path) -> list[str]:
    """Returns what mkdocstrings is asked to document."""
    return _REFERENCE.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as the table of contents makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}

"""The fenced blocks of README.md and docs/, and the mark above each: what is read of the pages.

docs/contributing.md has the convention for readers; ``MARKS`` below is its definition. Nothing is
run or checked here: ``check_blocks`` does the one, ``run/`` the other.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]

SHELL = "bash"
LANGUAGES = (SHELL, "python", "json", "yaml", "protobuf", "promql", "text")

NEEDS = {
    "gpu": "an NVIDIA GPU",
    "nvidia-image": "an image of NVIDIA's registry",
    "docker": "a container engine: `make test-compose` runs it",
    "package-index": "it installs packages: what it names is checked",
}
"""What the machine of the tests may lack. Of such a block only the names are checked."""

MARKS = ("needs", "run by", "takes", "tested by", "with", "serves", "file", "fragment", "output")
VALUES = {"with": ("server",), "serves": ("until stopped",), "output": ("of the block above",)}

_MARK = re.compile(r"^\s*<!--\s*(?P<inside>\S.*?)\s*-->\s*$")


class MarkError(ValueError):
    """A mark that the convention does not know. Says where it stands."""


@dataclass(frozen=True)
class Block:
    """One fence of a page."""

    page: Path
    """Relative to the root of the repository."""
    line: int
    """Of the fence's beginning, from 1."""
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether the tests run it as it stands, with what the page says it needs."""
        kept_from_it = {"needs", "run by", "takes", "tested by", "file", "fragment"}
        return self.language in (SHELL, "python") and not kept_from_it & self.marks.keys()

    @property
    def files(self) -> list[Path]:
        """Those that ``run by`` or ``tested by`` names."""
        named = self.marks.get("run by", "") or self.marks.get("tested by", "")
        return [Path(name.strip()) for name in named.split(",") if name.strip()]


def pages() -> list[Path]:
    """Every page of the documentation, relative to the root."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page.relative_to(ROOT) for page in found]


def read_page(page: Path, root: Path = ROOT) -> list[Block]:
    """All blocks of a page, in order. Raises MarkError."""
    return read_blocks((root / page).read_text(encoding="utf-8"), page)


def read_blocks(text: str, page: Path) -> list[Block]:
    """All blocks of a page's text, indented ones with the language ``indented``."""
    lines = text.splitlines()
    blocks = []
    for token in MarkdownIt("commonmark").parse(text):
        if token.type not in ("fence", "code_block") or token.map is None:
            continue
        start = token.map[0]
        language = token.info.strip() if token.type == "fence" else "indented"
        above = lines[start - 1] if start else ""
        marks = read_marks(above, f"{page}:{start + 1}")
        blocks.append(Block(page, start + 1, language, token.content, marks))
    return blocks


def read_marks(line: str, where: str) -> dict[str, str]:
    """The marks in a comment such as ``<!-- takes: 1 h; tested by: tests/x.py -->``, else none."""
    comment = _MARK.match(line)
    marks: dict[str, str] = {}
    for part in comment["inside"].split(";") if comment else []:
        name, colon, value = (word.strip() for word in part.partition(":"))
        if name not in MARKS or not colon or not value or name in marks:
            raise MarkError(f"{where}: {part.strip()!r} is no mark; they are: {', '.join(MARKS)}")
        allowed = NEEDS if name == "needs" else VALUES.get(name)
        if allowed is not None and value not in allowed:
            raise MarkError(
                f"{where}: {name} is {value!r}, but must be one of {', '.join(allowed)}"
            )
        marks[name] = value
    if ("takes" in marks) and "tested by" not in marks:
        raise MarkError(f"{where}: 'takes' goes with 'tested by'")
    return marks

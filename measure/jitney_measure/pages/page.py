"""A report page: one HTML file that holds its tables and plots, and the plots as PNG beside it.

The page is well-formed as XML too, needs neither script nor network, and follows the reader's light
or dark colours; plots stay on white. Callers give it blocks, and decide what they say.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from jitney_measure.pages.text import printable


@dataclass(frozen=True)
class Heading:
    """Of a section."""

    heading: str


@dataclass(frozen=True)
class Text:
    """A paragraph or code, by its ``tag``."""

    text: str
    style: str = ""
    tag: str = "p"


@dataclass(frozen=True)
class TableRow:
    """``style="chosen"`` highlights the row; ``note`` is a text below it over the whole width."""

    cells: Sequence[str]
    style: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Under a heading, its ``label``. A cell that is the name of a state has its colour."""

    label: str
    head: Sequence[str]
    rows: Sequence[TableRow]


@dataclass(frozen=True)
class Terms:
    """A list of terms and their meanings."""

    meanings: Mapping[str, str]


@dataclass(frozen=True)
class Plot:
    """``columns``: how many axes it has, side by side. With several it takes the whole width."""

    name: str
    caption: str
    svg: bytes
    png: bytes
    columns: int


Block = Heading | Text | Table | Terms | list[Plot]


def write_page(title: str, blocks: Sequence[Block], folder: Path) -> Path:
    """``report.html``, and the plots beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for block in blocks:
        if isinstance(block, list):
            for plot in block:
                (folder / f"{plot.name}.png").write_bytes(plot.png)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["base64"] = lambda raw: base64.b64encode(raw).decode("ascii")
    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    page = folder / "report.html"
    text = environment.from_string(source).render(title=title, blocks=blocks)
    page.write_text(printable(text), "utf-8")
    return page

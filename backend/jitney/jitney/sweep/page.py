"""HTML for the reports: the page, its style, tables and figures. Callers decide what they say.

One file, well-formed as XML too, with nothing from elsewhere and no script. It follows the reader's
choice of light or dark; pictures stay on white, as in the PNGs.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from jitney.sweep.drawing import Picture
from jitney.sweep.record import Point, printable

_CSS = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --dim: #5c5c5c; --line: #e0e0e0;
  --good: #00704f; --good-paper: #ecf8f3; --doubt: #8a5300; --bad: #b00020; --bad-paper: #fdf3ec; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181c; --dim: #a8adb5; --line: #363a42; --good: #4fd1a1;
    --good-paper: #14291f; --doubt: #f0b45a; --bad: #ff8a8a; --bad-paper: #2f1d16; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem;
  padding: 0 1rem; color: var(--ink); background: var(--paper); overflow-wrap: anywhere; }
h1 { margin: 0; line-height: 1.2; } h2 { margin: 2.25rem 0 .75rem; }
.dim, figcaption, dd, .note { color: var(--dim); }
.dim { margin-top: .4rem; }
.best { border-left: 4px solid var(--good); background: var(--good-paper); padding: .7rem 1rem; }
.none, .caution { border-left-color: var(--doubt); background: var(--bad-paper); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
thead th { vertical-align: bottom; }
thead th[colspan] { text-align: center; border-left: 1px solid var(--line); }
th.first { border-left: 1px solid var(--line); } td.first { border-left: 1px solid var(--line); }
tbody th, th.text, td.text { text-align: left; } tbody th { font-weight: normal; }
tr:has(+ .note) > * { border-bottom: none; }
.note td { padding: 0; }
.note div { text-align: left; white-space: normal; padding: 0 .7rem .4rem 1.6rem; font-size: 13px;
  max-width: min(60rem, 90vw); position: sticky; left: 0; }
tbody th, thead th:first-child { position: sticky; left: 0; background: var(--paper); }
.chosen > * { background: var(--good-paper); font-weight: bold; } .chosen th { font-weight: bold; }
.steady, .better { color: var(--good); } .unstable, .behind { color: var(--doubt); }
.failed, .worse { color: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr));
  grid-auto-flow: dense; gap: 1.25rem 1.5rem; margin: 1.75rem 0; }
figure { margin: 0; min-width: 0; } figure.whole { grid-column: 1 / -1; }
figure .wide { background: #fff; border-radius: 4px; }
img { display: block; width: 100%; height: auto; }
figcaption { font-size: 13px; margin-top: .25rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0; }
dd { margin: 0; }
.options { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .4rem; }
.options li { border: 1px solid var(--line); border-radius: 4px; padding: 0 .5rem; }
@media print { body { margin: 0; max-width: none; } figure, tr { break-inside: avoid; }
  th, td { padding: .15rem .3rem; } table { font-size: 10px; } }
"""


_PANEL_REM = 11.5
"""The least width of a panel beside others: four fit into a window of 768 pixels."""


@dataclass(frozen=True)
class Html:
    """A cell that is HTML already, with its class and how many columns it takes."""

    text: str
    mark: str = ""
    columns: int = 1


Cell = str | Html
"""Of a table; a string is plain text."""


def write_page(title: str, parts: Sequence[str], pictures: Sequence[Picture], folder: Path) -> Path:
    """``report.html`` of the parts, and the pictures beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png)
    page = folder / "report.html"
    body = "\n".join(parts)
    text = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8" />'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />'
        f"<title>{escape(title)}</title>"
        '<link rel="icon" href="data:," />'
        f"<style>{_CSS}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )
    page.write_text(printable(text), encoding="utf-8")
    return page


def figure_grid(pictures: Sequence[Picture]) -> str:
    """All pictures: the wide ones in lines of their own, the others in pairs where there is room.
    A wide one can be moved sideways on a narrow screen rather than shrink to nothing."""
    made = []
    for picture in pictures:
        encoded = base64.b64encode(picture.svg).decode("ascii")
        whole = ' class="whole"' if picture.panels > 1 else ""
        width = (
            f'style="min-width: {_PANEL_REM * picture.panels:g}rem" ' if picture.panels > 1 else ""
        )
        made.append(
            f'<figure id="{picture.name}"{whole}>{_sideways(picture.caption)}'
            f'<img src="data:image/svg+xml;base64,{encoded}" alt="{escape(picture.alt)}" '
            f"{width}/></div>"
            f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
        )
    return f'<div class="figures">{"".join(made)}</div>'


def table(
    head: Sequence[Cell],
    rows: Sequence[Sequence[Cell]],
    *,
    label: str,
    groups: Sequence[tuple[str, int]] = (),
    marks: Sequence[str] = (),
    texts: Sequence[int] = (),
) -> str:
    """``groups``: a line above the head, as (text, columns); ``marks``: a class for each row;
    ``texts``: columns, besides the first, that hold words rather than numbers."""
    starts = {sum(columns for _, columns in groups[:i]) for i in range(1, len(groups))}

    def cell(name: str, at: int, content: Cell, scope: str = "") -> str:
        html = content if isinstance(content, Html) else Html(escape(content))
        words = "text" if at == 0 or at in texts else ""
        mark = " ".join(filter(None, (html.mark, words, "first" if at in starts else "")))
        wide = f' colspan="{html.columns}"' if html.columns > 1 else ""
        return f"<{name}{scope}{wide}{_class(mark)}>{html.text}</{name}>"

    above = "".join(
        f'<th colspan="{columns}" scope="colgroup">{escape(text)}</th>' if text else "<td></td>"
        for text, columns in groups
    )
    heads = "".join(cell("th", at, text, ' scope="col"') for at, text in enumerate(head))
    made = []
    for row, mark in zip(rows, marks or [""] * len(rows), strict=True):
        cells = [
            cell("td", at, text) if at or len(row) == 1 else cell("th", at, text, ' scope="row"')
            for at, text in enumerate(row)
        ]
        made.append(f"<tr{_class(mark)}>{''.join(cells)}</tr>")
    return (
        f"{_sideways(label)}<table><thead>{f'<tr>{above}</tr>' if above else ''}<tr>{heads}</tr>"
        f"</thead><tbody>{''.join(made)}</tbody></table></div>"
    )


def _class(mark: str) -> str:
    return f' class="{mark}"' if mark else ""


def _sideways(label: str) -> str:
    """The opening of a box that scrolls, by keyboard too."""
    return f'<div class="wide" role="region" tabindex="0" aria-label="{escape(label)}">'


def note(text: str, columns: int) -> list[Cell]:
    """A row of one text that may take several lines."""
    return [Html(f"<div>{escape(text)}</div>", columns=columns)]


def state(point: Point) -> Html:
    """With its colour."""
    return Html(f'<span class="{point.state}">{point.state}</span>')


def number(value: float) -> str:
    """A throughput: tenths only where they say something."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def milliseconds(seconds: float | None) -> str:
    """Without the unit, which the head of the column has."""
    if seconds is None:
        return "–"
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

"""One page in a browser without a network, and what there is to complain about it.

Each check returns sentences; a page is right if there are none.
"""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Request, Route

WIDTHS = (360, 768, 1440)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
LEAST_CONTRAST = 4.5
"""Of text, as WCAG's level AA has it; texts of 24 pixels, or of 18.66 if bold, may have 3."""
LEAST_COLOURS = 24
_AFTER_MS = 300
"""What a page fetches or says so much later than its loading counts too."""
LEAST_INK = 0.004
"""Of a figure: the share of pixels that are not of its background."""

_OVERFLOW = """() => {
  const wide = document.documentElement.scrollWidth, room = window.innerWidth;
  if (wide <= room) return [];
  const inside = e => e.parentElement?.closest('.wide, .md-typeset__scrollwrap, pre, code');
  const guilty = [...document.body.querySelectorAll('*')].filter(
    e => e.getBoundingClientRect().right > room + 1 && !inside(e));
  return [`${wide} px wide in ${room}: ` +
    guilty.slice(0, 3).map(e => e.tagName + '.' + e.className).join(', ')];
}"""

_CONTRAST = """([least]) => {
  const parse = text => {
    const found = text.match(/[\\d.]+/g).map(Number);
    return [found[0], found[1], found[2], found[3] ?? 1];
  };
  const over = (top, under) => top.slice(0, 3).map(
    (value, i) => value * top[3] + under[i] * (1 - top[3]));
  const luminance = colour => {
    const [r, g, b] = colour.slice(0, 3).map(value => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const canvas = matchMedia('(prefers-color-scheme: dark)').matches &&
    getComputedStyle(document.documentElement).colorScheme.includes('dark') ?
    [18, 18, 18] : [255, 255, 255];
  const behind = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement)
      layers.unshift(parse(getComputedStyle(e).backgroundColor));
    return layers.reduce((under, top) => over(top, under), canvas);
  };
  const complaints = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement, style = getComputedStyle(element);
    if (!node.data.trim() || !element.checkVisibility() || element.closest('script, style'))
      continue;
    const back = behind(element), ink = over(parse(style.color), back);
    const [light, dark] = [luminance(ink), luminance(back)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : least))
      complaints.push(`"${node.data.trim().slice(0, 30)}" has a contrast of ${ratio.toFixed(2)}`);
  }
  return complaints;
}"""

_NAMES = """() => {
  const complaints = [];
  const named = e => (e.getAttribute('alt') ?? e.getAttribute('aria-label') ??
    e.querySelector('title')?.textContent ?? '').trim();
  if (!document.documentElement.lang) complaints.push('the page has no language');
  if (!document.title.trim()) complaints.push('the page has no title');
  const heads = document.querySelectorAll('h1').length;
  if (heads !== 1) complaints.push(`the page has ${heads} first headings`);
  for (const e of document.querySelectorAll('main img, figure svg, [role=region]'))
    if (named(e).length < 5)
      complaints.push(`a ${e.tagName} has no name: ${e.outerHTML.slice(0, 60)}`);
  return complaints;
}"""


class View:
    """A page that was opened from its file; ``close`` it."""

    def __init__(
        self,
        browser: "Browser",
        path: Path,
        *,
        width: int = 1440,
        scheme: Literal["light", "dark"] = "light",
    ) -> None:
        self._said: list[str] = []
        self._path = path.resolve()
        self._context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        self._context.route("**/*", self._answer)
        self.page = self._context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self._said.append(f"script error: {error}"))
        self.page.on("requestfailed", self._failed)
        self.page.goto(self._path.as_uri(), wait_until="load")
        self.page.wait_for_timeout(_AFTER_MS)

    def close(self) -> None:
        """End the page and all that belongs to it."""
        self._context.close()

    def said(self) -> list[str]:
        """Errors and warnings of the console and of scripts, and every request that was not for a
        file beside the page."""
        return list(self._said)

    def overflow(self) -> list[str]:
        """Whether the page as a whole can be moved sideways."""
        return list(self.page.evaluate(_OVERFLOW))

    def contrast(self) -> list[str]:
        """Texts that do not stand out from what is behind them."""
        return list(self.page.evaluate(_CONTRAST, [LEAST_CONTRAST]))

    def names(self) -> list[str]:
        """What someone who cannot see the page misses."""
        return list(self.page.evaluate(_NAMES))

    def undrawn(self, selector: str = "img, figure svg") -> list[str]:
        """Figures without size, or with nothing in them. A page without any is wrong, too."""
        found = self.page.locator(selector).all()
        complaints = [] if found else [f"there is no {selector}"]
        for i, figure in enumerate(found):
            name = figure.get_attribute("alt") or f"figure {i}"
            sized = figure.evaluate(
                "e => e.tagName === 'IMG' ? e.complete && e.naturalWidth * e.naturalHeight > 0"
                " : e.getBBox().width * e.getBBox().height > 0"
            )
            box = figure.bounding_box()
            if not sized or box is None or box["width"] < 50 or box["height"] < 50:
                complaints.append(f"{name}: is not there, or has no size")
            else:
                complaints += [f"{name}: {text}" for text in blank(figure.screenshot())]
        return complaints

    def texts(self, selector: str) -> list[str]:
        """As they are shown."""
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def _answer(self, route: "Route") -> None:
        address = urlsplit(route.request.url)
        folder = self._path.parent
        inside = Path(unquote(address.path)).is_relative_to(folder)
        if address.scheme == "data" or (address.scheme == "file" and inside):
            route.continue_()
        else:
            self._said.append(f"asked for {route.request.url}")
            route.abort()

    def _console(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning", "assert"):
            self._said.append(f"console {message.type}: {message.text}")

    def _failed(self, request: "Request") -> None:
        self._said.append(f"did not get {request.url}: {request.failure}")


def blank(png: bytes) -> list[str]:
    """Whether a picture has too little in it."""
    image = _image(png)
    colours = sorted(image.getcolors(1 << 24), reverse=True)
    ink = 1 - colours[0][0] / (image.width * image.height)
    if len(colours) < LEAST_COLOURS or ink < LEAST_INK:
        return [f"is blank: {len(colours)} colours, {ink:.1%} of it drawn"]
    return []


def cut_off(png: bytes) -> list[str]:
    """Whether something of a picture goes on beyond its edge, which must be all of one colour."""
    image = _image(png)
    right, low = image.width - 1, image.height - 1
    edges = {"left": (0, 0, 1, low), "right": (right, 0, right + 1, low),
             "upper": (0, 0, right, 1), "lower": (0, low, right, low + 1)}  # fmt: skip
    return [
        f"is cut off at its {name} edge"
        for name, box in edges.items()
        if len(image.crop(box).getcolors(1 << 24)) > 1
    ]


def missing(shown: Iterable[str], expected: Iterable[str]) -> list[str]:
    """What a record promises and the page does not have, or the other way round."""
    here, due = set(shown), set(expected)
    return [f"{name} is missing" for name in sorted(due - here)] + [
        f"{name} was not expected" for name in sorted(here - due)
    ]


def _image(png: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB")

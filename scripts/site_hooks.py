"""What mkdocs calls while it builds the site of docs/ (mkdocs.yml names this file).

The pages are read in the repository too, where a link may lead to a file outside docs/. The site
does not have that file: there the link becomes its text, with the path behind it. That the file
exists is tested in tests/project/test_docs.py.
"""

import re

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)\s#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """``markdown`` without the links that leave docs/."""
    return _OUTSIDE.sub(_as_path, markdown)


def _as_path(link: re.Match[str]) -> str:
    text = link[1]
    path = link[2]
    return f"`{path}`" if text.strip("`") in (path, f"../{path}") else f"{text} (`{path}`)"

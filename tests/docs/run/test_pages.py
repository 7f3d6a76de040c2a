"""Each page's blocks are run in order, in a copy of the repository, as a reader would run them."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import Block, pages, read_page
from tests.docs.run.serving import Server, check_ports_are_free, wait_ready
from tests.docs.run.shell import PageShell

PAGES = [page for page in pages() if any(block.is_run for block in read_page(page))]

_ERROR = re.compile(r'^(?:data: )?\{"error":', re.M)
"""How the server tells of an error, in a stream with status 200 too."""


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_page(page: Path, shell: PageShell, server: Server, scratch: Path) -> None:
    printed = ""
    for block in read_page(page):
        if "file" in block.marks:
            (scratch / block.marks["file"]).write_text(block.text, encoding="utf-8")
        elif "output" in block.marks:
            check_output(block, printed)
        elif block.is_run:
            printed = run(block, shell, server)


def run(block: Block, shell: PageShell, server: Server) -> str:
    """Run one block and return what it printed."""
    print(f"----- {block}", flush=True)
    if "with" in block.marks:
        server.start()
    if "serves" in block.marks:
        server.stop()
        check_ports_are_free()
        wait_ready(*shell.serve(block))
        return ""
    printed = shell.run(block)
    print(printed)
    assert not _ERROR.search(printed), f"{block}: the server answered with an error\n{printed}"
    return printed


def check_output(block: Block, printed: str) -> None:
    """What the page shows was printed, in this order; ``…`` stands for anything."""
    shown = "".join(block.text.split())
    pattern = ".*".join(re.escape(part) for part in shown.split("…"))
    assert re.search(pattern, "".join(printed.split()), re.S), f"{block}: printed was\n{printed}"

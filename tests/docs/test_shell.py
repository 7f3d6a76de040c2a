"""How the blocks of a page are run: together, strictly, and with nothing left behind."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.docs.blocks import Block
from tests.docs.run.shell import BlockError, PageShell
from tests.docs.run.test_pages import check_output

PAGE = Path("docs/page.md")


def bash(text: str) -> Block:
    return Block(PAGE, 7, "bash", text)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[PageShell]:
    (tmp_path / "checkout").mkdir()
    shell = PageShell(tmp_path / "checkout", dict(os.environ), tmp_path / "state")
    yield shell
    shell.close()


def test_variables_and_the_folder_are_carried_on(shell: PageShell) -> None:
    shell.run(bash("mkdir sub\ncd sub\nKEY=\"a b\"; OTHER='$x'"))
    said = shell.run(bash('echo "$KEY|$OTHER|$(basename "$PWD")"'))
    assert said == "a b|$x|sub\n"
    code = "import os, sys\nprint(os.environ['KEY'], os.path.basename(os.getcwd()))"
    assert shell.run(Block(PAGE, 9, "python", code)) == "a b sub\n"


@pytest.mark.parametrize("text", ["false\necho on", "echo $NOTHING", "false | cat", "exit 3"])
def test_a_failure_ends_the_page(shell: PageShell, text: str) -> None:
    with pytest.raises(BlockError, match=r"docs/page\.md:7: exit status [13]"):
        shell.run(bash(text))


def test_a_program_that_fails_ends_the_page(shell: PageShell) -> None:
    with pytest.raises(BlockError, match="ZeroDivisionError"):
        shell.run(Block(PAGE, 7, "python", "1 / 0"))


def test_a_block_has_a_time_limit(shell: PageShell) -> None:
    with pytest.raises(BlockError, match="none after 0 s"):
        shell.run(bash("sleep 60"), limit_s=0.3)


def test_what_a_page_starts_is_stopped(shell: PageShell) -> None:
    begun = time.monotonic()
    shell.run(bash("sleep 60 &\necho $! > pid"))
    process = psutil.Process(int((shell.folder / "pid").read_text(encoding="utf-8")))
    assert process.is_running()
    shell.close()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert time.monotonic() - begun < 30


def test_an_output_is_compared() -> None:
    shown = Block(PAGE, 7, "text", "digits: … up\nto date\n", {"output": "of the block above"})
    check_output(shown, "digits: all up to date\n")
    with pytest.raises(AssertionError, match="printed was"):
        check_output(shown, "digits: built\n")

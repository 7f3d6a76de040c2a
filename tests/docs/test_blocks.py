"""Every block of the documentation can be run, or says truly why not; and its names exist."""

from collections import Counter
from pathlib import Path

import pytest

from tests.docs.blocks import MARKS, NEEDS, ROOT, Block, MarkError, pages, read_blocks, read_page
from tests.docs.check_blocks import block_problems, inline_commands
from tests.docs.commands import commands
from tests.docs.names import problems

PAGE = Path("docs/page.md")
BLOCKS = [block for page in pages() for block in read_page(page)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_right(block: Block) -> None:
    assert list(block_problems(block)) == []


@pytest.mark.parametrize("page", pages(), ids=str)
def test_commands_in_the_text_exist(page: Path) -> None:
    for text in inline_commands(page):
        found = [problem for command in commands(text) for problem in problems(command)]
        assert found == [], text


def test_no_page_is_forgotten() -> None:
    from tests.docs.run.test_pages import PAGES

    assert {page for page in pages() if any(b.is_run for b in read_page(page))} == set(PAGES)
    assert len(BLOCKS) > 50


def test_what_no_machine_of_ours_can_run_is_listed_here() -> None:
    """So that none is added by a mark alone."""
    never = [b for b in BLOCKS if b.marks.get("needs") in ("gpu", "nvidia-image", "package-index")]
    assert Counter((b.marks["needs"], str(b.page)) for b in never) == {
        ("gpu", "docs/gpu.md"): 2,
        ("gpu", "docs/benchmarks.md"): 1,
        ("nvidia-image", "docs/deploying.md"): 1,
    }


def test_the_convention_is_written_down() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    written = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `<!--")]
    for name in MARKS:
        assert any(f"{name}: " in cell for cell in written), name
    for need in NEEDS:
        assert f"`needs: {need}`" in page or f"`<!-- needs: {need} -->`" in page, need


# --------------------------------------------------------------------------- the checks find it


@pytest.mark.parametrize(
    ("language", "text", "said"),
    [
        ("bash", "make nonsense", "no target nonsense"),
        ("bash", "sleep 1 | .venv/bin/jitney nonsense", "no command nonsense"),
        ("bash", "python -m benchmarks.engine --nonsense", "no option --nonsense"),
        ("bash", "cat deploy/nonsense", "the path deploy/nonsense"),
        ("bash", "curl http://localhost -d '{}'", "curl sends a form"),
        ("bash", "for x in 1; do", "syntax error"),
        ("sh", "ls", "must be one of"),
        ("python", "def f(:", "invalid syntax"),
        ("json", '{"model": "x", "nonsense": 1}', "no option nonsense"),
        ("protobuf", "nonsense { }", "nonsense"),
        ("promql", "rate(jitney_nonsense_total[5m])", "no metric jitney_nonsense_total"),
        ("yaml", "services: {nonsense: {}}", "no service nonsense"),
    ],
)
def test_what_is_wrong_is_found(language: str, text: str, said: str) -> None:
    (block,) = read_blocks(f"```{language}\n{text}\n```\n", PAGE)
    assert any(said in problem for problem in block_problems(block)), list(block_problems(block))


@pytest.mark.parametrize(
    ("mark", "language", "text", "said"),
    [
        ("run by: .ci/run", "bash", "make test-gpu", "runs make test-gpu"),
        ("tested by: tests/server/test_serve.py", "bash", "make test-gpu", "runs make test-gpu"),
        ("fragment: c = tritonclient.grpc.InferInput", "python", "c.nonsense()", "no nonsense"),
        ("fragment: c = value", "python", "d.nonsense()", "the name d is"),
    ],
)
def test_a_mark_that_is_not_true_is_found(mark: str, language: str, text: str, said: str) -> None:
    (block,) = read_blocks(f"<!-- {mark} -->\n```{language}\n{text}\n```\n", PAGE)
    assert any(said in problem for problem in block_problems(block)), list(block_problems(block))


def test_a_mark_that_is_none_is_refused() -> None:
    with pytest.raises(MarkError, match=r"docs/page\.md:2"):
        read_blocks("<!-- needs: luck -->\n```bash\nls\n```\n", PAGE)

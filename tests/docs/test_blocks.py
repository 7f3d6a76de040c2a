"""Every block of the documentation can be run, or says truly why not; and its names exist."""

from collections import Counter
from pathlib import Path

import pytest

from tests.docs.blocks import MARKS, NEEDS, ROOT, Block, MarkError, pages, read_blocks, read_page
from tests.docs.check_blocks import block_problems, inline_commands, unset_variables
from tests.docs.commands import Command, assigned, commands
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


@pytest.mark.parametrize("page", pages(), ids=str)
def test_variables_are_set_before_they_are_used(page: Path) -> None:
    assert list(unset_variables(page)) == []


def test_no_page_is_forgotten() -> None:
    from tests.docs.run.test_pages import PAGES

    assert {page for page in pages() if any(b.is_run for b in read_page(page))} == set(PAGES)
    assert len(BLOCKS) > 50


def test_what_no_machine_of_ours_can_run_is_listed_here() -> None:
    """So that none is added by a mark alone."""
    never = [b for b in BLOCKS if b.marks.get("needs") in ("gpu", "nvidia-image", "package-index")]
    assert Counter((b.marks["needs"], str(b.page)) for b in never) == {
        ("gpu", "docs/gpu.md"): 2,
        ("nvidia-image", "docs/deploying.md"): 1,
        ("package-index", "README.md"): 1,
    }


def test_the_convention_is_written_down() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    written = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `<!--")]
    for name in MARKS:
        assert any(f"{name}: " in cell for cell in written), name
    for need in NEEDS:
        assert f"`needs: {need}`" in page or f"`<!-- needs: {need} -->`" in page, need


# --------------------------------------------------------------------------- the checks bite


def blocks_of(text: str) -> list[Block]:
    return read_blocks(text, PAGE)


def test_marks_are_read() -> None:
    (block,) = blocks_of(
        "x\n<!-- takes: 1 h; tested by: tests/docs/names.py -->\n```bash\nls\n```\n"
    )
    assert block.marks == {"takes": "1 h", "tested by": "tests/docs/names.py"}
    assert (block.line, block.language, block.text, block.is_run) == (3, "bash", "ls\n", False)
    assert block.files == [Path("tests/docs/names.py")]


@pytest.mark.parametrize(
    "mark", ["takes: 1 h", "needs: luck", "skip: me", "needs", "with: server; with: server"]
)
def test_a_mark_that_is_none_is_refused(mark: str) -> None:
    with pytest.raises(MarkError, match=r"docs/page\.md:2"):
        blocks_of(f"<!-- {mark} -->\n```bash\nls\n```\n")


@pytest.mark.parametrize(
    ("language", "text", "said"),
    [
        ("bash", "make nonsense", "no target nonsense"),
        ("bash", "make demo NONSENSE=1", "no variable NONSENSE"),
        ("bash", "jitney serve --nonsense 3", "no option --nonsense"),
        ("bash", "sleep 1 | .venv/bin/jitney nonsense", "no command nonsense"),
        ("bash", "python -m benchmarks.nonsense", "no module benchmarks.nonsense"),
        ("bash", "python -m benchmarks.engine --nonsense", "no option --nonsense"),
        ("bash", "python -m benchmarks.sweep pylm --nonsense", "no option --nonsense"),
        ("bash", "python -m export digits --nonsense", "no option --nonsense"),
        ("bash", "python scripts/nonsense.py", "scripts/nonsense.py is not there"),
        ("bash", "pip install -e '.[nonsense]'", "no extra nonsense"),
        ("bash", "python -m pytest tests -m 'not nonsense'", "no marker nonsense"),
        ("bash", "cat deploy/nonsense", "the path deploy/nonsense"),
        ("bash", "curl http://127.0.0.1:8000/v2/models/nonsense/ready", "no model nonsense"),
        ("bash", "nonsense --now", "'nonsense' is not known"),
        ("bash", "docker-compose exec nonsense ls", "no service"),
        ("bash", "jitney serve FILE", "placeholder"),
        ("bash", "for x in 1; do", "syntax error"),
        ("sh", "ls", "must be one of"),
        ("", "ls", "must be one of"),
        ("python", "def f(:", "invalid syntax"),
        ("json", '{"model": "x", "nonsense": 1}', "no option nonsense"),
        ("json", "{", "Expecting"),
        ("protobuf", "nonsense { }", "nonsense"),
        ("promql", "rate(jitney_nonsense_total[5m])", "no metric jitney_nonsense_total"),
        ("yaml", "services: {nonsense: {}}", "no service nonsense"),
    ],
)
def test_what_is_wrong_is_found(language: str, text: str, said: str) -> None:
    (block,) = blocks_of(f"```{language}\n{text}\n```\n")
    assert any(said in problem for problem in block_problems(block)), list(block_problems(block))


@pytest.mark.parametrize(
    ("mark", "text", "said"),
    [
        ("run by: .ci/run", "make test-slow", "runs make test-slow"),
        ("run by: .ci/nonsense", "make test", ".ci/nonsense is not there"),
        ("tested by: tests/house/test_cli.py", "make test-gpu", "runs make test-gpu"),
        ("tested by: tests/docs/names.py", "make docs", "is no file of tests"),
        ("needs: docker", "docker-compose pull", "does not run it"),
        ("needs: package-index", "make models && cat x", "cat installs nothing"),
        ("fragment: x = value", "ls", "only Python"),
        ("output: of the block above", "ls", "has the language text"),
    ],
)
def test_a_mark_that_is_not_true_is_found(mark: str, text: str, said: str) -> None:
    (block,) = blocks_of(f"<!-- {mark} -->\n```bash\n{text}\n```\n")
    assert any(said in problem for problem in block_problems(block)), list(block_problems(block))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("stranger.infer('x', [])", "stranger is neither bound"),
        ("client.nonsense()", "has no nonsense"),
        ("client.infer('x', [], nonsense=1)", "unexpected keyword argument 'nonsense'"),
        ("client.infer()", "missing a required argument"),
        ("import tritonclient.grpc as t\nt.Nonsense()", "has no Nonsense"),
        ("c = t.InferenceServerClient('x')\nc.nonsense()", "has no nonsense"),
    ],
)
def test_a_fragment_that_is_wrong_is_found(code: str, said: str) -> None:
    names = "client = tritonclient.grpc.InferenceServerClient, t = tritonclient.grpc"
    (block,) = blocks_of(f"<!-- fragment: {names} -->\n```python\n{code}\n```\n")
    assert any(said in problem for problem in block_problems(block)), list(block_problems(block))


def test_shell_is_taken_apart() -> None:
    text = """\
KEY=$(cut -d: -f2 keys)  # a comment; with && signs
until curl -sf "http://a/#b"; do sleep 1; done
for i in 1 2; do echo "$i" > out 2>&1; done
A=1 python x.py --one \\
  --two & cat <<'EOF' > my.py
import nothing
EOF
"""
    assert list(commands(text)) == [
        Command("cut", ("-d:", "-f2", "keys")),
        Command("curl", ("-sf", "http://a/#b")),
        Command("sleep", ("1",)),
        Command("echo", ("$i",), "out"),
        Command("python", ("x.py", "--one", "--two")),
        Command("cat", (), "my.py"),
    ]
    assert assigned(text) == {"KEY", "A"}

"""The project's own lint rule: what it counts, and that its table only falls."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tuples() -> ModuleType:
    """scripts/tuples.py."""
    spec = importlib.util.spec_from_file_location("tuples", ROOT / "scripts" / "tuples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("a, b = x, y", True),
        ("self.a, b[0] = 1, f(2)", True),
        ("a, b = b, a + b", True),
        ("a, *b = 1, 2, 3", True),
        ("a, b = b, a", False),
        ("a[i], a[j] = a[j], a[i]", False),
        ("a, b = f(x)", False),
        ("a, b = (f(each) for each in x)", False),
        ("a = x, y", False),
        ("a = b = x", False),
    ],
)
def test_what_counts(tuples: ModuleType, line: str, counts: bool) -> None:
    assert tuples.is_double(ast.parse(line).body[0]) is counts


def test_a_new_one_is_named_with_its_place(tuples: ModuleType, tmp_path: Path) -> None:
    """In a room that has none, in one that may have one, and not in what is not the project's."""
    for name in ("backend/jitney/jitney/core/a.py", "jobs/b.py", ".venv/c.py", "build/d.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("\na, b = 1, 2\n", encoding="utf-8")
    found = tuples.find(tmp_path)
    assert found == {
        "jitney/core": ["backend/jitney/jitney/core/a.py:2"],
        "jobs": ["jobs/b.py:2"],
    }
    (said,) = tuples.complaints({"jitney/core": 1}, found)
    assert said.startswith("jobs has 1 ")
    assert "may have 0" in said
    assert said.endswith("jobs/b.py:2")


def test_the_table_only_falls(tuples: ModuleType) -> None:
    found = {"a": ["1"], "b": ["1", "2"], "new": ["1"]}
    allowed = {"a": 3, "b": 1, "gone": 2}
    assert tuples.lowered(allowed, found) == {"a": 1, "b": 1}
    said = tuples.complaints(allowed, found)
    assert [line.split()[0] for line in said] == ["a", "b", "gone", "new"]
    assert "--lower" in said[0]
    assert "--lower" in said[2]

"""Imports point strictly downward, and each foreign library stays where it belongs.

Every module is parsed, not imported: an import inside a function counts like one at the top.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "backend" / "jitney" / "jitney"

# A component is a module or a folder of the package. It may import from lower layers and, if it is
# a folder, from itself; neighbours in one layer do not know each other.
LAYERS = [
    {"errors", "quiet"},
    {"config"},
    {"sampling_params"},
    {"request"},
    {"core", "execution"},
    {"stop_strings", "detokenizer", "chat", "installation", "ports", "server_log"},
    {"admin"},
    {"stopping"},
    # They know the errors only: model.py of the backends beside ours import the first; the second
    # measures any server.
    {"standin", "sweep"},
    {"engine", "tokenizer", "server"},
    {"completion", "intake", "trial", "tune"},
    {"llm", "process", "doctor"},
    {"frontend"},
    {"cli"},
]
RANK = {component: rank for rank, layer in enumerate(LAYERS) for component in layer}

# Library -> the components that may import it. What is not listed is free for all.
CONFINED = {
    "torch": {"execution", "engine", "llm", "doctor"},
    "transformers": {"execution", "tokenizer", "cli"},  # cli: to silence it
    "numba": {"execution"},
    "triton": {"execution"},
    "triton_python_backend_utils": {"frontend"},
    "onnxruntime": {"standin"},
    "tensorrt": {"standin"},
    "tritonclient": {"tune"},  # its schema of config.pbtxt
    "pytriton": set(),
    "typer": {"cli", "sweep", "tune"},
    "matplotlib": {"sweep"},
}
HANDS_ENVIRONMENT_ON = {"server", "installation", "sweep"}
# The core decides from what it is given: no clock, no chance, no threads.
FORBIDDEN_IN_CORE = {"time", "random", "secrets", "threading", "asyncio", "numpy", "os"}


def modules() -> list[Path]:
    """All but the package's own `__init__`, which resolves its names on first use."""
    return sorted(
        path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__"
    )


def component_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_names(tree: ast.AST, path: Path) -> Iterator[str]:
    """Absolute dotted names of everything that is imported anywhere in ``tree``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import, line {node.lineno}"
            assert node.module is not None
            if node.module == "jitney":
                yield from (f"jitney.{alias.name}" for alias in node.names)
            else:
                yield node.module


def violations(component: str, names: list[str]) -> list[str]:
    """What ``component`` imports but must not."""
    found = []
    for name in names:
        head, _, rest = name.partition(".")
        if head == "jitney":
            target = rest.split(".")[0]
            if target in ("", "__version__") or target == component:
                continue
            if target not in RANK:
                found.append(f"{name}: give {target!r} a layer in this test")
            elif RANK[target] >= RANK[component]:
                found.append(f"{name}: {component} may not import {target}")
        elif component not in CONFINED.get(head, {component}):
            found.append(f"{name}: {component} may not import {head}")
        elif component == "core" and head in FORBIDDEN_IN_CORE:
            found.append(f"{name}: the core may not import {head}")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    component = component_of(path)
    assert component in RANK, f"give {component!r} a layer in this test"
    names = list(imported_names(ast.parse(path.read_text(encoding="utf-8")), path))
    assert violations(component, names) == []


def test_the_rule_finds_violations() -> None:
    """The check itself: each of these must be caught."""
    cases = {
        "core": "from jitney.execution.runner import Runner",
        "execution": "def f():\n    import jitney.core.scheduler",
        "request": "from jitney import engine",
        "config": "from jitney.sampling_params import SamplingParams",
        "llm": "import triton_python_backend_utils as pb_utils",
        "server": "from jitney.engine import Engine",
    }
    for component, source in cases.items():
        names = list(imported_names(ast.parse(source), Path("case.py")))
        assert len(violations(component, names)) == 1, source
    torch = list(imported_names(ast.parse("import torch.nn"), Path("case.py")))
    assert violations("core", torch)
    assert violations("execution", torch) == []
    assert violations("core", ["time"])


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if component_of(path) not in HANDS_ENVIRONMENT_ON],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_option_comes_from_an_environment_variable(path: Path) -> None:
    """Only the launcher touches the environment: to hand it on to its child process."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = f"{node.value.id}.{node.attr}"
            assert used not in ("os.environ", "os.getenv"), f"line {node.lineno}: {used}"


def test_no_catch_all_modules() -> None:
    names = {path.stem for path in modules()}
    assert not names & {"utils", "common", "helpers", "misc", "triton"}

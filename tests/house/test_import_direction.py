"""Imports point strictly downward, from room to room and inside every room; foreign libraries
stay where they belong.

Every module is parsed, not imported: an import inside a function counts like one at the top.
"""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "backend" / "jitney" / "jitney"

# Room -> the rooms that it may import, besides itself and those that these may import. A room is a
# folder of the package, or one of the modules at its top.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "sampling_params": {"config"},
    "messages": {"sampling_params"},
    "core": {"messages"},
    "execution": {"messages"},
    "text": {"messages"},
    "kernels": {"execution"},
    "quantization": {"execution"},
    "adapters": {"execution"},
    "engine": {"core"},
    "server_log": set(),
    "standins": {"errors", "server_log"},
    "access": {"errors"},
    "tracing": {"errors"},
    "report": {"errors"},
    "server": {"errors"},
    "frontend": {"text", "engine", "server_log", "tracing"},
    "offline": {"text", "engine", "standins", "report", "access"},
    "measure": {"core", "server", "report", "access"},
    "gateway": {"offline", "tracing"},
    "cli": {"measure", "gateway", "server", "offline", "frontend"},
}
# The one file that knows the rooms which run a model, and puts them together.
ASSEMBLY = "engine.assemble"
MAY_IMPORT_IN_ASSEMBLY = {"kernels", "quantization", "adapters", "execution", "text"}
# What the engine asks of a runner: the one module of execution that its others may name.
PROTOCOLS = ".execution.protocols."

# Library -> the rooms that may import it. What is not listed is free for all.
CONFINED = {
    "torch": {"execution", "kernels", "quantization", "adapters", "engine", "offline", "server"},
    "transformers": {
        "execution",
        "kernels",
        "quantization",
        "text",
        "offline",
    },  # offline: to silence it
    "numba": {"kernels"},
    "triton": {"kernels", "quantization"},
    "llguidance": {"text"},
    "triton_python_backend_utils": {"frontend"},
    "onnxruntime": {"standins"},
    "tensorrt": {"standins"},
    "tritonclient": {"measure", "offline", "gateway"},  # measure: its schema of config.pbtxt
    "fastapi": {"gateway"},
    "uvicorn": {"gateway"},
    "pytriton": set(),
    "typer": {"cli", "measure", "offline"},
    "matplotlib": {"measure", "report"},
    "pyarrow": {"offline"},
    "opentelemetry": {"tracing"},
}
HANDS_ENVIRONMENT_ON = ("server.", "measure.", "engine.nursery")
# The core decides from what it is given: no clock, no chance, no threads.
FORBIDDEN_IN_CORE = {"time", "random", "secrets", "threading", "asyncio", "numpy", "os"}


def modules() -> dict[str, Path]:
    """Dotted name inside the package -> file. Without the package's own `__init__`, which resolves
    its names on first use."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def below(room: str) -> set[str]:
    """All rooms that ``room`` may import."""
    return MAY_IMPORT[room].union(*map(below, MAY_IMPORT[room]))


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Absolute dotted names of everything that is imported anywhere in ``tree``, without the
    package's own name in front of what is ours: ``jitney.core.plan`` is ``.core.plan``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import, line {node.lineno}"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name.removeprefix("jitney") if name.startswith("jitney.") else name


def violations(module: str, names: list[str]) -> list[str]:
    """What ``module`` imports but must not."""
    room = module.partition(".")[0]
    allowed = below(room) | (MAY_IMPORT_IN_ASSEMBLY if module == ASSEMBLY else set())
    found = []
    for name in names:
        head = name.split(".")[0]
        if room == "engine" and name.startswith(PROTOCOLS):
            continue
        if not head:
            target = name.split(".")[1]
            if target not in {"__version__", room} and target not in allowed:
                found.append(f"{module} may not import {name[1:]}")
        elif room not in CONFINED.get(head, {room}):
            found.append(f"{room} may not import {head}")
        elif room == "core" and head in FORBIDDEN_IN_CORE:
            found.append(f"the core may not import {head}")
    return found


def circle(imports: Mapping[str, list[str]]) -> list[str]:
    """A circle of imports inside a room, or an import upward: neither has an order in which every
    import points down. ``imports`` has the names that each module of the rooms imports.

    Looked at are the members of each folder: its modules, its ``__init__`` among them, and its
    subfolders, each taken as one. So a module of a subfolder that imports one of the folder above,
    which imports the subfolder, is upward, even if no two modules import each other.
    """
    folders = {name.rpartition(".")[0] for name in imports} - {""}
    for folder in sorted(folders):
        start = f"{folder}."
        graph: dict[str, set[str]] = {}
        for name, imported in imports.items():
            member = member_of(start, name)
            if member is None:
                continue
            for target in imported:
                known = target[1:]
                while known and known not in imports:  # a name of a module, not a module
                    known = known.rpartition(".")[0]
                below_it = member_of(start, known) if known else None
                if below_it not in (None, member):
                    graph.setdefault(member, set()).add(str(below_it))
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            return list(reversed(error.args[1]))
    return []


def member_of(start: str, module: str) -> str | None:
    """The member of the folder ``start`` that ``module`` is or stands in."""
    return start + module.removeprefix(start).split(".")[0] if module.startswith(start) else None


def names_in(path: Path) -> list[str]:
    return list(imported_names(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("module", modules())
def test_imports_point_downward_from_room_to_room(module: str) -> None:
    assert module.split(".")[0] in MAY_IMPORT, "give this room its place in MAY_IMPORT"
    assert violations(module, names_in(modules()[module])) == []


def test_imports_point_downward_inside_every_room() -> None:
    found = circle({m: names_in(p) for m, p in modules().items()})
    assert found == [], f"these import each other: {' -> '.join(found)}"


def test_the_rule_finds_violations() -> None:
    """The check itself: each of these must be caught."""
    cases = {
        "core.plan": "from jitney.execution.runner import Runner",
        "execution.load": "def f():\n    import jitney.core.scheduler",
        "execution.runner": "from jitney.kernels.cpu import attention",
        "execution.machine": "import triton.language as tl",
        "engine.engine": "from jitney.kernels import fuse",
        "engine.process": "from jitney.execution.runner import TorchRunner",
        "messages": "from jitney import engine",
        "config": "from jitney.sampling_params import SamplingParams",
        "offline.llm": "import triton_python_backend_utils as pb_utils",
        "server.server": "from jitney.engine.engine import Engine",
    }
    for module, source in cases.items():
        assert len(violations(module, list(imported_names(ast.parse(source))))) == 1, source
    torch = list(imported_names(ast.parse("import torch.nn")))
    assert violations("core.plan", torch)
    assert violations("execution.runner", torch) == []
    assert violations("engine.assemble", [".kernels.fuse"]) == []
    assert violations("engine.engine", [".execution.protocols.Runner"]) == []
    assert violations("core.plan", [".execution.protocols.Runner"])
    assert violations("core.plan", ["time"])


def test_the_rule_finds_circles_and_upward_imports_inside_a_room() -> None:
    two = {"core.a": [".core.b.B"], "core.b": [".core.a"]}
    assert set(circle(two)) == {"core.a", "core.b"}
    upward = {"core.a": [".core.part.b"], "core.part.b": [".core.c"], "core.c": [".core.a.A"]}
    assert circle(upward)
    folders = {"core.a": [".core.part.b"], "core.part.b": [], "core.part.c": [".core.a"]}
    assert set(circle(folders)) == {"core.a", "core.part"}
    assert circle({"core.a": [".core.b"], "core.b": [".core.c.C"], "core.c": []}) == []


@pytest.mark.parametrize("module", [m for m in modules() if not m.startswith(HANDS_ENVIRONMENT_ON)])
def test_no_option_comes_from_an_environment_variable(module: str) -> None:
    """Only who starts a process touches the environment: to hand it on."""
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = f"{node.value.id}.{node.attr}"
            assert used not in ("os.environ", "os.getenv"), f"line {node.lineno}: {used}"


def test_no_catch_all_modules() -> None:
    names = {part for module in modules() for part in module.split(".")}
    assert not names & {"utils", "common", "helpers", "misc", "triton"}

"""Imports point strictly downward: from package to package, from room to room of the engine's
package, and inside every one of them. Foreign libraries stay where they belong.

Every module is parsed, not imported: an import inside a function counts like one at the top, and so
does a string that names a module of ours, which somebody will import.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "jitney": ROOT / "backend" / "jitney" / "jitney",
    "jitney_server": ROOT / "server" / "jitney_server",
    "jitney_gateway": ROOT / "gateway" / "jitney_gateway",
    "jitney_jobs": ROOT / "jobs" / "jitney_jobs",
    "jitney_measure": ROOT / "measure" / "jitney_measure",
    "export": ROOT / "export",
}

# Room -> the rooms that it may import, besides itself and those that these may import. A room is a
# folder of `jitney` or one of the modules at its top, or one of its neighbours as a whole.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "field_types": set(),
    "config": set(),
    "read_config": {"config", "errors", "field_types"},
    "sampling_params": {"config", "errors", "field_types"},
    "messages": {"sampling_params"},
    "token_counts": set(),
    "named_tokens": {"sampling_params"},
    "batch": {"messages", "named_tokens", "token_counts"},
    "rank": set(),
    "core": {"batch", "rank"},
    "addresses": set(),
    "cgroups": set(),
    "gguf_header": set(),
    "execution": {"batch", "cgroups", "gguf_header"},
    "text": {"batch", "gguf_header"},
    "kernels": {"execution"},
    "quantization": {"execution"},
    "adapters": {"execution", "rank"},
    "engine": {"core"},
    "stub_memory": set(),
    "server_log": {"stub_memory"},
    "server_watch": set(),
    "stop_signals": set(),
    "access": {"errors"},
    "tracing": {"errors"},
    "frontend": {
        "text",
        "engine",
        "server_log",
        "server_watch",
        "stop_signals",
        "tracing",
        "read_config",
    },
    "progress": {"errors"},
    "open_requests": {"text", "engine"},
    "llm": {"open_requests", "progress", "read_config"},
    "generate": {"llm"},
    "cli": {"engine"},
    # The neighbours. None of the rooms above names one of them.
    "jitney_server": {
        "addresses",
        "cgroups",
        "config",
        "engine",
        "errors",
        "read_config",
        "server_log",
        "stop_signals",
    },
    "jitney_gateway": {"addresses", "text", "tracing"},
    "jitney_measure": {"jitney_server", "core", "engine", "access", "read_config"},
    "jitney_jobs": {"jitney_gateway", "jitney_measure", "llm"},
    "export": {"jitney_measure"},
}
NEIGHBOURS = {"jitney_server", "jitney_gateway", "jitney_jobs", "jitney_measure", "export"}
# The one file that knows the rooms which run a model, and puts them together. It finds kernels by
# their entry points.
ASSEMBLY = "jitney.engine.assemble"
MAY_IMPORT_IN_ASSEMBLY = {"quantization", "adapters", "execution", "text"}
# What the engine asks of a runner: the one module of execution that its others may name.
PROTOCOLS = "jitney.execution.protocols."

# Library -> the rooms that may import it. What is not listed is free for all.
CONFINED = {
    "torch": {
        "execution", "kernels", "quantization", "adapters", "engine", "llm", "jitney_server",
        "export",
    },
    # generate, to silence it
    "transformers": {"execution", "kernels", "quantization", "text", "generate", "export"},
    "numba": {"kernels"},
    "triton": {"kernels"},
    "llguidance": {"text"},
    "triton_python_backend_utils": {"frontend"},
    "c_python_backend_utils": {"stub_memory"},
    "onnxruntime": {"jitney_server", "export"},
    "tensorrt": {"jitney_server", "export"},
    # measure: its schema of config.pbtxt
    "tritonclient": {"jitney_measure", "jitney_jobs", "jitney_gateway", "export"},
    "fastapi": {"jitney_gateway", "jitney_jobs"},
    "uvicorn": {"jitney_gateway"},
    "pytriton": set(),
    "typer": {"cli", "generate", *NEIGHBOURS},
    "matplotlib": {"jitney_measure"},
    "pyarrow": {"jitney_jobs"},
    "opentelemetry": {"tracing"},
}  # fmt: skip
HANDS_ENVIRONMENT_ON = (
    "jitney_server.",
    "jitney_measure.",
    "jitney.engine.child_process",
    "jitney.stop_signals",  # reads there where its launcher writes to it: no option
    "jitney_jobs.ray_cluster",  # starts Ray's processes, and quiets them
    "jitney_jobs.ray_library",  # as that, before Ray is imported
    "export.",
)
# The core decides from what it is given: no clock, no chance, no threads.
FORBIDDEN_IN_CORE = {"time", "random", "secrets", "threading", "asyncio", "numpy", "os"}

# In a string: the name of a module, of at least two parts or of a neighbour.
_NAMED = re.compile(r"\b(?:(?:jitney|export)\.[a-z_]\w*(?:\.\w+)*|jitney_[a-z]+(?:\.\w+)*)")


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file. Without the engine package's own `__init__`, which resolves its names
    on first use."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            if parts != ("jitney", "__init__"):
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


def room_of(module: str) -> str:
    """The room that a module of ours stands in: `jitney.core.plan` in `core`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "jitney" and len(parts) > 1 else parts[0]


def below(room: str) -> set[str]:
    """All rooms that ``room`` may import."""
    return MAY_IMPORT[room].union(*map(below, MAY_IMPORT[room]))


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Absolute dotted names of everything that is imported or named anywhere in ``tree``."""
    # A docstring may speak of everybody.
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import, line {node.lineno}"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield from modules_named(str(node.value))


def modules_named(text: str) -> Iterator[str]:
    """What a string names that is a module of ours, or something in one."""
    for name in _NAMED.findall(text):
        longest = name
        while longest and longest not in modules():
            longest = longest.rpartition(".")[0]
        if longest:
            yield name


def violations(module: str, names: list[str]) -> list[str]:
    """What ``module`` imports but must not."""
    room = room_of(module)
    allowed = below(room) | (MAY_IMPORT_IN_ASSEMBLY if module == ASSEMBLY else set())
    if room in NEIGHBOURS:
        allowed |= {"cli"}  # they start its commands as processes
    found = []
    for name in names:
        head = name.split(".")[0]
        if room == "engine" and name.startswith(PROTOCOLS):
            continue
        if head in PACKAGES:
            target = room_of(name)
            if target not in {"__version__", "jitney", room} and target not in allowed:
                found.append(f"{module} may not import {name}")
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
                known = target
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


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def names_in(path: Path) -> list[str]:
    return list(imported_names(tree_of(path)))


@pytest.mark.parametrize("module", modules())
def test_imports_point_downward_from_room_to_room(module: str) -> None:
    assert room_of(module) in MAY_IMPORT, "give this room its place in MAY_IMPORT"
    assert violations(module, names_in(modules()[module])) == []


def test_imports_point_downward_inside_every_room() -> None:
    found = circle({m: names_in(p) for m, p in modules().items()})
    assert found == [], f"these import each other: {' -> '.join(found)}"


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith("jitney.core.policy.")])
def test_a_policy_knows_requests_and_blocks_and_nothing_else_of_the_core(module: str) -> None:
    assert beyond_a_policy(names_in(modules()[module])) == []


def beyond_a_policy(names: list[str]) -> list[str]:
    """Which of these names no policy may import, since they are of other parts of the core."""
    known = tuple(f"jitney.core.{each}." for each in ("policy", "request", "drafting", "kv_cache"))
    return [
        name for name in names if name.startswith("jitney.core.") and not name.startswith(known)
    ]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_each_room_is_refused_every_room_that_is_not_below_it(room: str) -> None:
    """The check itself, rule by rule: an import of each other room must be caught."""
    module = room if room in NEIGHBOURS else f"jitney.{room}"
    allowed = below(room) | ({"cli"} if room in NEIGHBOURS else set())
    for other in set(MAY_IMPORT) - allowed - {room}:
        name = other if other in NEIGHBOURS else f"jitney.{other}"
        assert violations(f"{module}.x", [f"{name}.y"]), f"{module} may import {name}"
    for other in below(room):
        name = other if other in NEIGHBOURS else f"jitney.{other}"
        assert not violations(f"{module}.x", [f"{name}.y"])


@pytest.mark.parametrize("library", CONFINED)
def test_each_library_is_refused_where_it_does_not_belong(library: str) -> None:
    for room in MAY_IMPORT:
        module = f"{room}.x" if room in NEIGHBOURS else f"jitney.{room}.x"
        assert bool(violations(module, [f"{library}.y"])) == (room not in CONFINED[library])


@pytest.mark.parametrize("library", sorted(FORBIDDEN_IN_CORE))
def test_the_core_decides_from_what_it_is_given(library: str) -> None:
    assert violations("jitney.core.plan", [library])
    assert violations("jitney.engine.engine", [library]) == []


def test_the_rule_reads_every_form_of_import_and_strings() -> None:
    """Each of these must be caught, whatever form it has."""
    cases = {
        "jitney.core.plan": "from jitney.execution.runner import Runner",
        "jitney.execution.load": "def f():\n    import jitney.core.scheduler",
        "jitney.execution.machine": "import triton.language as tl",
        "jitney.messages": "from jitney import engine",
        "jitney.engine.supervisor": "LOADER = 'jitney.kernels.cpu.ahead:compile_ahead'",
        "jitney.engine.process": "command = f'-m jitney_jobs.worker {1}'",
        "jitney_server.server": "from jitney.execution.runner import TorchRunner",
        "jitney_jobs.job": "LOADER = 'export.onnx_model'",
    }
    for module, source in cases.items():
        assert len(violations(module, list(imported_names(ast.parse(source))))) == 1, source
    allowed = '"""As jitney.core.plan does."""\nname = "jitney.request_id"'
    assert violations("jitney.errors", list(imported_names(ast.parse(allowed)))) == []
    assert violations(ASSEMBLY, ["jitney.quantization.quantize"]) == []
    assert violations(ASSEMBLY, ["jitney.kernels.cpu.accelerator"])
    assert violations("jitney.engine.engine", ["jitney.execution.protocols.Runner"]) == []
    assert violations("jitney.core.plan", ["jitney.execution.protocols.Runner"])


def test_the_rule_finds_circles_and_upward_imports_inside_a_room() -> None:
    two = {"core.a": ["core.b.B"], "core.b": ["core.a"]}
    assert set(circle(two)) == {"core.a", "core.b"}
    upward = {"core.a": ["core.part.b"], "core.part.b": ["core.c"], "core.c": ["core.a.A"]}
    assert circle(upward)
    folders = {"core.a": ["core.part.b"], "core.part.b": [], "core.part.c": ["core.a"]}
    assert set(circle(folders)) == {"core.a", "core.part"}
    assert circle({"core.a": ["core.b"], "core.b": ["core.c.C"], "core.c": []}) == []


@pytest.mark.parametrize("module", [m for m in modules() if not m.startswith(HANDS_ENVIRONMENT_ON)])
def test_no_option_comes_from_an_environment_variable(module: str) -> None:
    """Only who starts a process touches the environment: to hand it on."""
    assert list(reads_of_environment(tree_of(modules()[module]))) == []


def reads_of_environment(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = f"{node.value.id}.{node.attr}"
            if used in ("os.environ", "os.getenv"):
                yield f"line {node.lineno}: {used}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
            if names & {"environ", "getenv"}:
                yield f"line {node.lineno}: from os import {', '.join(sorted(names))}"


def test_no_catch_all_modules() -> None:
    assert catch_alls(modules()) == set()


def catch_alls(names: Iterable[str]) -> set[str]:
    """Parts of modules' names that say nothing, or hide a library's."""
    parts = {part for name in names for part in name.split(".")}
    return parts & {"utils", "common", "helpers", "misc", "triton"}


def test_the_other_rules_find_what_they_forbid() -> None:
    known = ["jitney.core.request.Request", "jitney.core.drafting.Drafting"]
    unknown = ["jitney.core.plan.Planner", "jitney.core.live.LiveRequests"]
    assert beyond_a_policy(known + unknown) == unknown
    with pytest.raises(AssertionError, match="a relative import, line 1"):
        list(imported_names(ast.parse("from . import plan")))
    for source in ("import os\nx = os.environ['A']", "import os\nx = os.getenv('A')"):
        assert list(reads_of_environment(ast.parse(source))) != []
    assert list(reads_of_environment(ast.parse("from os import environ"))) != []
    assert list(reads_of_environment(ast.parse("import os\nx = os.path"))) == []
    assert catch_alls(["jitney.core.utils", "jitney.core.plan"]) == {"utils"}

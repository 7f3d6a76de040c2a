"""Whether what a command names is there: programs, options, targets, modules, files, models.

One function per program, in ``CHECKS``; each yields what is wrong, in words. A program that is not
in ``CHECKS`` must be one of ``COMMON``. Nothing is run.
"""

import ast
import importlib.util
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.docs.blocks import ROOT
from tests.docs.commands import Command

# fmt: off
COMMON = (
    ".", "cat", "cd", "chmod", "cp", "cut", "date", "echo", "exit", "export",
    "false", "grep", "head", "jq", "kill", "mkdir", "mv", "printf", "pwd", "rm", "sed", "seq",
    "set", "sleep", "sort", "source", "tail", "tar", "tee", "test", "timeout", "tr", "true", "wait",
)
# fmt: on
"""Programs of the shell or of Debian. Of these, only the paths they are given are checked."""

Problems = Iterator[str]


def problems(command: Command) -> Problems:
    """What is wrong with the names in one command."""
    program = Path(command.program).name
    if "/" in command.program and not command.program.startswith(".venv/bin/"):
        if not (ROOT / command.program).is_file() and not _is_ignored(command.program):
            yield f"{command.program} is not there"
        return
    if program in CHECKS:
        yield from CHECKS[program](command.words)
    elif program not in COMMON:
        yield f"the program {program!r} is not known to tests/docs/names.py"
    yield from _paths(command.words)


def _paths(words: Sequence[str]) -> Problems:
    """A word that begins with a folder of the repository must name something in it, unless git
    ignores it: then it is made by a command."""
    for word in words:
        path = word.rpartition("=")[2] if word.startswith("-") else word
        first = path.split("/")[0]
        if "/" not in path or not first or not (ROOT / first).is_dir() or (ROOT / path).exists():
            continue
        if not _is_ignored(path):
            yield f"the path {path} is not there"


@cache
def _is_ignored(path: str) -> bool:
    asked = ["git", "check-ignore", "--quiet", "--no-index", path]
    return subprocess.run(asked, cwd=ROOT, check=False).returncode == 0


# ------------------------------------------------------------------- make, python, pip, pytest


def _make(words: Sequence[str]) -> Problems:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and not re.search(rf"^(?:export )?{name} *[?:]?=|\$\({name}\)", text, re.M):
            yield f"the Makefile has no variable {name}"
        if not equals and not re.search(rf"^{re.escape(name)}:", text, re.M):
            yield f"the Makefile has no target {name}"


def _python(words: Sequence[str]) -> Problems:
    if not words or words[0] in ("-", "-c", "--version"):
        return
    if words[0] == "-m" and len(words) > 1:
        module, rest = words[1], words[2:]
        if module == "pip":
            yield from _pip(rest)
        elif module == "pytest":
            yield from _pytest(rest)
        elif module == "venv":
            return
        else:
            found = _source_of(module)
            if found is None:
                yield f"there is no module {module}"
            else:
                yield from _options(found, rest)
    elif (ROOT / words[0]).is_file():
        yield from _options(ROOT / words[0], words[1:])
    elif words[0].endswith(".py") and "/" in words[0]:
        yield f"{words[0]} is not there"


def _source_of(module: str) -> Path | None:
    """The file that ``python -m module`` runs: one of ours, or of an installed package."""
    path = ROOT / module.replace(".", "/")
    for candidate in (path.with_suffix(".py"), path / "__main__.py"):
        if candidate.is_file():
            return candidate
    top = module.split(".")[0]
    found = None if (ROOT / top).is_dir() else importlib.util.find_spec(top)
    return Path(found.origin) if found and found.origin else None


def _options(source: Path, words: Sequence[str]) -> Problems:
    """Each ``--option`` among ``words`` is one that the program's source defines."""
    if ROOT not in source.parents or ".venv" in source.parts:
        return
    if source.name == "sweep.py" and source.parent.name == "benchmarks":
        yield from _jitney(["bench", *words])
        return
    known = {"--help"}.union(*(_strings(file) for file in (source, *_imported(source))))
    parameters = {name.replace("_", "-") for name in _parameters(source)}
    for option in _named_options(words):
        if option not in known and option[2:] not in parameters:
            yield f"{source.relative_to(ROOT)} has no option {option}"


@cache
def _strings(source: Path) -> frozenset[str]:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return frozenset(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _imported(source: Path) -> Iterator[Path]:
    """Modules of the same package that a program imports: some define its options."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            path = (ROOT / node.module.replace(".", "/")).with_suffix(".py")
            if path.is_file():
                yield path


def _parameters(source: Path) -> set[str]:
    """Arguments of functions that typer makes options of."""
    text = source.read_text(encoding="utf-8")
    if "typer" not in text:
        return set()
    return {node.arg for node in ast.walk(ast.parse(text)) if isinstance(node, ast.arg)}


def _named_options(words: Sequence[str]) -> list[str]:
    return [word.split("=")[0] for word in words if re.match(r"--\w", word)]


@cache
def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _pip(words: Sequence[str]) -> Problems:
    extras = _project()["project"]["optional-dependencies"]
    for word in words:
        if word.startswith("triton-jitney"):
            yield "no package index has triton-jitney"
        match = re.fullmatch(r"\.\[([\w,-]+)\]", word)
        for extra in match[1].split(",") if match else ():
            if extra not in extras:
                yield f"pyproject.toml has no extra {extra}"


def _pytest(words: Sequence[str]) -> Problems:
    settings = _project()["tool"]["pytest"]["ini_options"]
    markers = {line.split(":")[0] for line in settings["markers"]}
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word == "-m":
            for name in set(re.findall(r"\w+", value)) - {"not", "and", "or"}:
                if name not in markers:
                    yield f"pytest has no marker {name}"
        elif word.startswith("tests") and not (ROOT / word.split("::")[0]).exists():
            yield f"{word} is not there"


# --------------------------------------------------------------------------- jitney, docker compose


def _jitney(words: Sequence[str]) -> Problems:
    import typer
    from jitney import cli

    group = typer.main.get_command(cli.make_app())
    if not words or words[0].startswith("-"):
        known = {option for parameter in group.params for option in parameter.opts}
    else:
        command = group.commands.get(words[0])  # type: ignore[attr-defined]
        if command is not None and hasattr(command, "commands"):  # a group, such as batch
            command = command.commands.get(words[1]) if words[1:] else command
        if command is None:
            yield f"jitney has no command {' '.join(words[:2])}"
            return
        known = {option for parameter in command.params for option in parameter.opts}
    for option in _named_options(words):
        if option not in known | {"--help"}:
            yield f"jitney {words[0]} has no option {option}"


@cache
def compose_services() -> frozenset[str]:
    """Names of the services of docker-compose.yml."""
    return frozenset(yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"])


def _docker(words: Sequence[str]) -> Problems:
    if not words or words[0] != "compose":
        return
    services = compose_services()
    plain = compose_words(words[1:])
    subcommand = plain[0] if plain else ""
    if subcommand in ("exec", "run", "restart", "logs", "kill", "start", "stop", "build"):
        named = [word for word in plain[1:] if word in services]
        if len(plain) > 1 and not named:
            yield f"docker-compose.yml has no service of {' '.join(plain[1:])!r}"
    elif subcommand not in ("up", "down", "ps", "config", "pull"):
        yield f"docker compose {subcommand!r} is not known to tests/docs/names.py"


def _curl(words: Sequence[str]) -> Problems:
    """Without a type, curl sends a form. A large one ends Triton."""
    sends = any(word == "-d" or word.startswith("--data") for word in words)
    if sends and "Content-Type: application/json" not in words:
        yield "curl sends a form: say -H 'Content-Type: application/json'"


def compose_words(words: Sequence[str]) -> list[str]:
    """Words from the subcommand on, without options and the values of the options before it."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        rest = rest[1:] if "=" in rest[0] else rest[2:]
    return [word for word in rest if not word.startswith("-")]


CHECKS: dict[str, Callable[[Sequence[str]], Problems]] = {
    "make": _make,
    "python": _python,
    "python3": _python,
    "pip": _pip,
    "pytest": _pytest,
    "jitney": _jitney,
    "curl": _curl,
    "docker": _docker,
}

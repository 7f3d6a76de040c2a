"""What can be told of a block without running it: names, syntax, whether its mark is true."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml
from google.protobuf import text_format
from jitney.config import EngineConfig
from markdown_it import MarkdownIt
from tritonclient.grpc import model_config_pb2

from tests.docs.blocks import LANGUAGES, ROOT, SHELL, Block, read_page
from tests.docs.commands import Command, commands
from tests.docs.fragments import fragment_problems
from tests.docs.names import CHECKS, compose_services, problems


def block_problems(block: Block) -> Iterator[str]:
    """What is wrong with a block, in words."""
    if block.language not in LANGUAGES:
        yield f"the language is {block.language!r}, but must be one of {', '.join(LANGUAGES)}"
        return
    if block.language == SHELL:
        yield from _shell_problems(block)
    elif block.language == "python":
        yield from _python_problems(block)
    elif block.language != "text":
        yield from _data_problems(block)
    yield from _mark_problems(block)


# --------------------------------------------------------------------------- languages


def _shell_problems(block: Block) -> Iterator[str]:
    said = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
    )
    if said.returncode:
        yield said.stderr.strip()
        return
    for command in commands(block.text):
        yield from problems(command)
    if block.marks.get("needs") == "package-index":
        return  # the address of an index is the reader's
    for placeholder in re.findall(
        r"\bPATH/TO\b|(?<![$\w{])\b(?:PATH|FILE|MODEL)\b(?!=)|…", block.text
    ):
        yield f"{placeholder!r} is a placeholder: set a variable in an earlier line"


def _python_problems(block: Block) -> Iterator[str]:
    try:
        compile(block.text, str(block), "exec")
    except SyntaxError as error:
        yield f"line {error.lineno}: {error.msg}"
        return
    if "fragment" in block.marks:
        yield from fragment_problems(block.text, block.marks["fragment"])


def _data_problems(block: Block) -> Iterator[str]:
    """A configuration or a query: it is read, and its names are ours."""
    try:
        if block.language == "json":
            for name in json.loads(block.text):
                if name not in EngineConfig.__struct_fields__:
                    yield f"model.json has no option {name}"
        elif block.language == "protobuf":
            text_format.Parse(block.text, model_config_pb2.ModelConfig())
        elif block.language == "promql":
            metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
            for name in set(re.findall(r"jitney_\w+?(?=_bucket|_sum|_count|\b)", block.text)):
                if f"`{name}`" not in metrics:
                    yield f"there is no metric {name}"
        elif block.language == "yaml":
            yield from _yaml_problems(yaml.safe_load(block.text))
    except (ValueError, text_format.ParseError, yaml.YAMLError) as error:
        yield str(error)


def _yaml_problems(found: object) -> Iterator[str]:
    for service in found.get("services", {}) if isinstance(found, dict) else ():
        if service not in compose_services():
            yield f"docker-compose.yml has no service {service}"


# --------------------------------------------------------------------------- marks


def _mark_problems(block: Block) -> Iterator[str]:
    marks = block.marks
    if "fragment" in marks and block.language != "python":
        yield "only Python has fragments"
    if "output" in marks and block.language != "text":
        yield "an output has the language text"
    if {"serves", "run by", "takes", "tested by"} & marks.keys() and block.language != SHELL:
        yield "this mark is for blocks of commands"
    yield from _needs_problems(block)
    if block.language == SHELL:
        for path in block.files:
            is_test = path.parts[0] == "tests" and path.match("test_*.py")
            if "tested by" in marks and not is_test:
                yield f"{path} is no file of tests"
            if not (ROOT / path).is_file():
                yield f"{path} is not there"
                return
        if block.files:
            for command in commands(block.text):
                if not any(mentions(path, command) for path in block.files):
                    yield f"no {' or '.join(map(str, block.files))} runs {command}"


def _needs_problems(block: Block) -> Iterator[str]:
    needed = block.marks.get("needs")
    if needed == "docker":
        # Not above: those tests import this package.
        from tests.compose.engine.test_cpu_document import CASES, ELSEWHERE

        if block.page != Path("docs/deploying.md") or not any(
            part in block.text for part in (*CASES, *ELSEWHERE)
        ):
            yield "tests/compose/engine/test_cpu_document.py does not run it"
    for command in commands(block.text) if needed == "package-index" else ():
        if command.program not in ("pip", "make"):
            yield f"{command.program} installs nothing: it can be run"


def mentions(path: Path, command: Command) -> bool:
    """Whether a file runs what ``command`` runs, with whatever settings."""
    keys = _keys(command)
    if path.suffix == ".md":
        return any(
            block.is_run and any(_keys(other) == keys for other in commands(block.text))
            for block in read_page(path)
        )
    text = (ROOT / path).read_text(encoding="utf-8")
    return all(re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", text) for key in keys)


def _keys(command: Command) -> tuple[str, ...]:
    """The words that make ``command`` what it is."""
    program = Path(command.program).name
    plain = [word for word in command.words if not word.startswith("-") and "=" not in word]
    if program.startswith("python") and command.words:
        return (command.words[1] if command.words[0] == "-m" else Path(command.words[0]).name,)
    if program in ("make", "jitney"):
        return (program, plain[0])
    if program == "curl":
        (url,) = (word for word in command.words if "://" in word)
        return (url.rpartition("/")[2],)
    return (program,)


# --------------------------------------------------------------------------- between the lines


def inline_commands(page: Path) -> Iterator[str]:
    """Code in the text of a page that is a command of ours, such as ``make doctor``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        for child in token.children or ():
            words = child.content.split()
            program = words[0].removeprefix(".venv/bin/") if words else ""
            if child.type == "code_inline" and len(words) > 1 and program in CHECKS:
                yield child.content

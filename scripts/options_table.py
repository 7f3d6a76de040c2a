"""Write docs/options.md from the docstrings in config.py, so that the two cannot differ.

    python scripts/options_table.py

A test compares the file with what this would write.
"""

import ast
import re
import sys
from pathlib import Path

from jitney import config
from jitney.field_types import describe_range

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "options.md"
SOURCE = Path(config.__file__)

INTRODUCTION = """# Options of a model

Options are keys of the JSON object in `model_repository/<model>/1/model.json`. Only `model` is
required. An unknown name, a wrong type or a value out of range fails the load of that model, with a
message that names the option, the value and the bound. The same options are keyword arguments of
`jitney.LLM(path, …)`.

```json
{"model": "checkpoint", "max_model_len": 4096, "kv_cache_bytes": 2000000000}
```

An option in `config.pbtxt` replaces the one in `model.json`. So the server's repository API can
load a model with other options without a change to its files. The value is text: a string as it is,
any other value as JSON.

```protobuf
parameters { key: "max_num_seqs" value { string_value: "64" } }
```

Names in capitals (`EXECUTION_ENV_PATH`) belong to the server.

The server sets the number of instances and their devices: `instance_group` in `config.pbtxt`. This
page is generated from `config.py` by `scripts/options_table.py`.
"""


def make_page() -> str:
    """The whole page."""
    source = SOURCE.read_text(encoding="utf-8")
    (struct,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineConfig"
    )
    sections = {
        number: line.split("-- ")[1]
        for number, line in enumerate(source.splitlines(), start=1)
        if line.startswith("    # -- ")
    }
    aliases = {
        node.targets[0].id: node.value  # type: ignore[attr-defined]
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal[")
    }
    parts = [INTRODUCTION]
    for node, following in zip(struct.body, [*struct.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign):
            continue
        for number in [number for number in sections if number < node.lineno]:
            title = sections.pop(number)
            parts.append(f"\n## {title[0].upper()}{title[1:]}\n\n| option | default | meaning |")
            parts.append("\n|---|---|---|\n")
        name = ast.unparse(node.target)
        if not isinstance(following, ast.Expr):
            raise SystemExit(f"config.py: the option {name} has no docstring")
        meaning = " ".join(str(ast.literal_eval(following.value)).split())
        parts.append(
            _row(name, node, meaning.replace("``", "`").replace("None:", "Not set:"), aliases)
        )
    return "".join(parts)


def _row(name: str, node: ast.AnnAssign, meaning: str, aliases: dict[str, ast.expr]) -> str:
    shown = "required" if node.value is None else _show(ast.literal_eval(node.value))
    kind = ast.unparse(aliases.get(ast.unparse(node.annotation), node.annotation))
    notes = []
    if kind.startswith("Literal["):
        notes.append("One of " + ", ".join(re.findall(r"'(\w+)'", kind)) + ".")
    if bound := describe_range(config.EngineConfig, name):
        notes.append(f"Must be {bound}.")
    return f"| `{name}` | {shown} | {' '.join([meaning, *notes])} |\n"


def _show(value: object) -> str:
    """A default as JSON would have it, but readable."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(make_page(), encoding="utf-8")
    sys.exit(0)

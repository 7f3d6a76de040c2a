"""The demo's last part: a job over some hundred rows, by `jitney batch run`, without a server.

It embeds the first line of the docstrings of Python's standard library, into Parquet. The job shows
its own progress; its status has the rows and what they cost.
"""

import ast
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

ROWS = 400
SHOWN = ("rows", "cost")
"""Of the lines of a job's status."""


def show(console: Console, repository: Path) -> list[str]:
    """The whole part. Returns what did not come out as it should; empty if all did."""
    console.print(Rule(f"A job: {ROWS} texts into Parquet, without a server", align="left"))
    with tempfile.TemporaryDirectory(prefix="jitney-demo-") as folder:
        source = Path(folder, "functions.jsonl")
        with source.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in islice(functions(), ROWS))
        words = ["batch", "run", str(source), f"{folder}/vectors", "--task", "embed"]
        words += ["--model", str(repository / "minilm"), "--output-format", "parquet"]
        shown = " ".join(words).replace(f"{folder}/", "").replace(f"{repository.parent}/", "")
        console.print(Text(f"  jitney {shown}", "dim"))
        done = subprocess.run(  # its progress goes to this terminal, from stderr
            [sys.executable, "-m", "jitney.cli", *words],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    for line in done.stdout.splitlines():
        if line.startswith(SHOWN):
            console.print(f"  {line}")
    if done.returncode == 0 and re.search(rf"^rows .* {ROWS} written, 0 bad$", done.stdout, re.M):
        return []
    return [f"the job ended with status {done.returncode}: {done.stdout}"]


def functions() -> Iterator[dict[str, str]]:
    """Functions and classes of the standard library: name, and first line of the docstring."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                said = ast.get_docstring(node)
                if said:
                    yield {"name": f"{path.stem}.{node.name}", "text": said.splitlines()[0]}

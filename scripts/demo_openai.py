"""The demo's question through the OpenAI API: a gateway before the server, asked by curl for JSON
that fits a schema.
"""

import json
import shutil
import subprocess
import sys

from demo_requests import MODEL, TIMEOUT_S
from jitney_server.server import TritonServer
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

PROMPT = "function = "
NAME = {"type": "string", "pattern": "^[a-z_]{3,12}$"}
SCHEMA = {
    "type": "object",
    "properties": {"name": NAME, "static": {"type": "boolean"}},
    "required": ["name", "static"],
    "additionalProperties": False,
}
CURL = "curl --silent --show-error --fail-with-body"
JSON = "Content-Type: application/json"


def show(console: Console, server: TritonServer) -> list[str]:
    """Start the gateway, ask, stop it. Returns what went wrong."""
    console.print(Rule("The OpenAI API, by curl", align="left"))
    if shutil.which("curl") is None:
        console.print("Left out: there is no curl.")
        return []
    command = [sys.executable, "-m", "jitney.cli", "gateway", "--port", "0"]
    gateway = subprocess.Popen(
        [*command, "--server", server.grpc_url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert gateway.stdout is not None
        words = gateway.stdout.readline().split()
        return _ask(console, words[-1]) if words else ["the gateway did not start"]
    finally:
        gateway.terminate()
        gateway.wait(TIMEOUT_S)


def _ask(console: Console, url: str) -> list[str]:
    wanted = {"type": "json_schema", "json_schema": {"name": "function", "schema": SCHEMA}}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 64, "response_format": wanted}
    console.print(Text(f"$ {CURL} {url}/completions -H '{JSON}' -d '{json.dumps(body)}'", "dim"))
    asked = subprocess.run(
        [*CURL.split(), f"{url}/completions", "-H", JSON, "-d", json.dumps(body)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if asked.returncode != 0:
        return [f"curl ended with status {asked.returncode}: {asked.stderr} {asked.stdout}"]
    answer = json.loads(asked.stdout)
    (choice,) = answer["choices"]
    console.print(Text.assemble((PROMPT, "dim"), choice["text"]))
    used = answer["usage"]
    console.print(f"{used['prompt_tokens']} tokens in, {used['completion_tokens']} out")
    said = json.loads(choice["text"])
    fits = said.keys() == {"name", "static"} and isinstance(said["static"], bool)
    return [] if fits else [f"the answer does not fit the schema: {said}"]

"""Profile `cpu`, run by a real engine: every command of docs/deploying.md, as it stands there, by a
user in a checkout. Only the two published ports have other numbers.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.compose.engine.deployment import Deployment
from tests.compose.engine.project import document_block
from tests.docs.blocks import Block, read_page

BLOCKS = [
    block
    for block in read_page(Path("docs/deploying.md"))
    if block.language in ("bash", "python", "sh")
]
# What the fixtures of other modules begin with: `deployment`, `perf` and `two`.
ELSEWHERE = ("docker compose up --build", "--profile perf run", "--scale gateway=2")


@pytest.fixture(scope="module")
def user(deployment: Deployment) -> Deployment:
    """With files that one of the blocks takes."""
    for option, name in (("pip_conf", "pip.conf"), ("ca_bundle", "ca.pem")):
        (found,) = (each for each in deployment.engine.secrets if f"id={option}," in each)
        shutil.copy(found.rpartition("src=")[2], deployment.project / name)
    return deployment


def run(user: Deployment, block: Block) -> str:
    """Output of a block."""
    text = block.text.replace("8443", user.settings["HTTPS_PORT"])
    if block.language == "python":
        return user.run(sys.executable, "-c", text, timeout_s=60)
    return user.shell(text, timeout_s=1200)


# Part of a block -> what its output has, as a pattern.
CASES = {
    "generate_stream": r'data: \{.*"text_output"',
    "DefaultHttpxClient": r"^Completion\(.*text=",
    "InferenceServerClient": r"^True$",
    "docker build": "",
    "reload-keys": "",
    "query?query=up": r'"job":"triton"(.|\n)*nv_inference_count',
}


@pytest.mark.parametrize("part", CASES)
def test_a_block_of_the_document(user: Deployment, part: str) -> None:
    assert re.search(CASES[part], run(user, document_block(part)), re.M)


def test_every_command_of_the_document_is_run() -> None:
    assert all(block.marks.get("needs") in ("docker", "nvidia-image") for block in BLOCKS)
    lines = {document_block(part).line for part in (*ELSEWHERE, *CASES)}
    assert lines == {block.line for block in BLOCKS}


def test_no_layer_keeps_the_package_index(user: Deployment) -> None:
    history = user.engine.docker("history", "--no-trunc", "jitney/triton-cpu:local").stdout
    assert "extra-index-url" not in history
    for file in ("/etc/pip.conf", "/run/secrets/ca_bundle"):
        kept = user.run_in("triton-cpu", "sh", "-c", f"cat {file} 2>/dev/null || true")
        assert kept == ""


def test_the_overriding_file_of_the_document_is_taken(user: Deployment) -> None:
    (block,) = (each for each in read_page(Path("docs/deploying.md")) if each.language == "yaml")
    file = user.project / "docker-compose.override.yml"
    file.write_text(block.text, encoding="utf-8")
    try:
        made = user.engine.run(
            ["docker-compose", "--profile", "gpu", "config"], folder=user.project
        ).stdout
    finally:
        file.unlink()
    assert "CUDA_VISIBLE_DEVICES: '0'" in made

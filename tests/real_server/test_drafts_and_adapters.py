"""A model with drafts and adapters on a real server: an adapter by its name, over gRPC and through
the gateway."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from jitney_server.server import TritonServer

from tests.adapters.adapter_files import write_adapter
from tests.real_server.client import stream
from tests.real_server.conftest import BLOCK_BYTES, write_model

PROMPT = "the bus stops here, " * 6


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[TritonServer]:
    """A server with a model ``drafts``, which has the adapter ``law``."""
    adapters = tmp_path_factory.mktemp("adapters")
    write_adapter(adapters / "law", 8)
    repository = tmp_path_factory.mktemp("drafts")
    options = {
        "model": str(checkpoint), "dtype": "float32", "threads": 1, "adapters": str(adapters),
        "kv_cache_bytes": 512 * BLOCK_BYTES, "speculation": {"drafter": "ngram"},
    }  # fmt: skip
    write_model(repository, "drafts", options)
    with TritonServer(repository, exit_timeout_s=60) as started:
        yield started
        assert started.stop(), f"{started.last_stop.problem}\n{started.log_tail(40)}"


def text_of(server: TritonServer, lora_name: str | None) -> str:
    """The greedy answer without the gateway."""
    params = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "lora_name": lora_name}
    return stream(server.grpc_url, "drafts", text_input=PROMPT, sampling_parameters=params).text


def test_an_adapter_is_a_model_for_the_gateway(drafts: TritonServer) -> None:
    jitney = str(Path(sys.executable).parent / "jitney")
    command = [jitney, "gateway", "--server", drafts.grpc_url, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    with openai.OpenAI(base_url=url, api_key="none") as client:
        parents = {each.id: (each.model_extra or {}).get("parent") for each in client.models.list()}
        texts = [
            "".join(
                chunk.choices[0].text
                for chunk in client.completions.create(
                    model=name, prompt=PROMPT, max_tokens=40, temperature=0, stream=True,
                    extra_body={"ignore_eos": True},
                )
            )
            for name in ("drafts", "law")
        ]  # fmt: skip
    process.terminate()
    assert process.wait(30) == 0
    assert parents == {"drafts": None, "law": "drafts"}
    assert texts == [text_of(drafts, name) for name in (None, "law")]
    assert texts[0] != texts[1]

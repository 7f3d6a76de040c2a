"""A model with drafts and adapters on a real server: the tokens of a model without drafts, and an
adapter by its name, over gRPC and through the gateway."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from jitney_server.server import TritonServer

from tests.adapters.adapter_files import write_adapter
from tests.real_server.client import Reply, metric, stream, wait_until
from tests.real_server.conftest import BLOCK_BYTES, write_model

PROMPT = "the bus stops here, " * 6
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 60, "logit_bias": {"70": 100.0}},  # one token, easily drafted
    {"temperature": 0, "max_tokens": 150},
    {"temperature": 0, "max_tokens": 60, "logprobs": 2},
    {"temperature": 1, "seed": 5, "max_tokens": 100},
    {"temperature": 1, "seed": 6, "n": 2, "max_tokens": 60, "repetition_penalty": 1.1},
    {"temperature": 0, "max_tokens": 60, "structured_outputs": {"regex": "(yes,|no,)*"}},
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``drafts``' adapters, which has ``law``."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "law", 8)
    return folder


@pytest.fixture(scope="module")
def drafts(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, adapters: Path
) -> Iterator[TritonServer]:
    """A server with a model ``drafts``."""
    repository = tmp_path_factory.mktemp("drafts")
    options = {
        "model": str(checkpoint), "dtype": "float32", "threads": 1, "adapters": str(adapters),
        "kv_cache_bytes": 512 * BLOCK_BYTES, "speculation": {"drafter": "ngram"},
    }  # fmt: skip
    write_model(repository, "drafts", options)
    with TritonServer(repository, exit_timeout_s=60) as started:
        yield started
        assert started.stop(), f"{started.last_stop.problem}\n{started.log_tail(40)}"


def ask(server: TritonServer, model: str, params: dict[str, Any]) -> Reply:
    return stream(
        server.grpc_url,
        model,
        text_input=PROMPT,
        sampling_parameters={"ignore_eos": True, **params},
        return_finish_reason=True,
        return_logprobs="logprobs" in params,
    )


def test_tokens_are_those_of_a_model_without_drafts(
    server: TritonServer, drafts: TritonServer
) -> None:
    for params in REQUESTS:
        reply, plain = ask(drafts, "drafts", params), ask(server, "tiny", params)
        assert not reply.errors
        assert reply.texts == plain.texts
        assert reply.last("finish_reason") == plain.last("finish_reason")
        if "logprobs" in params:
            assert tokens_of(reply) == tokens_of(plain)

    def count(name: str) -> float:
        return metric(drafts.metrics_url, f"jitney_{name}_total", model="drafts")

    def repeats() -> float:
        """Until steps are measured well enough for drafts to pay."""
        assert not ask(drafts, "drafts", REQUESTS[0]).errors
        return count("accepted_draft_tokens")

    wait_until(repeats, 300)
    assert count("draft_tokens") >= max(count("accepted_draft_tokens"), count("draft_rows"))


def tokens_of(reply: Reply) -> list[list[str]]:
    """The candidates of each token, the best ones among them."""
    lists = [json.loads(text) for text in reply.all("logprobs")]
    return [list(entry) for entries in lists for entry in entries]


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
    params = {"temperature": 0, "max_tokens": 40}
    by_name = [ask(drafts, "drafts", {**params, "lora_name": name}).text for name in (None, "law")]
    assert texts == by_name
    assert texts[0] != texts[1]


def test_an_adapter_comes_later_and_goes(
    drafts: TritonServer, adapters: Path, tmp_path: Path
) -> None:
    """It is found when a request first names it; once its folder is gone, its name is unknown."""
    folder = adapters / "tax"
    params = {"temperature": 0, "max_tokens": 5, "lora_name": "tax"}
    assert "lora_name is 'tax'" in ask(drafts, "drafts", params).error
    write_adapter(tmp_path / "tax", 3)
    (tmp_path / "tax").rename(folder)
    assert not ask(drafts, "drafts", params).errors
    folder.rename(tmp_path / "tax")
    assert "lora_name is 'tax'" in ask(drafts, "drafts", params).error

"""Profile `cpu`, run by a real engine: the gateway behind the proxy, alone and as one of two."""

import contextlib
import json
import ssl
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.compose.engine.clients import PROMPT
from tests.compose.engine.deployment import Deployment, wait_for
from tests.compose.engine.project import document_block


def openais(deployment: Deployment, name: str = "first") -> openai.OpenAI:
    """OpenAI's own client, with the key of that name."""
    client = deployment.client(name)
    trust = ssl.create_default_context(cafile=str(client.certificate))
    return openai.OpenAI(
        base_url=f"https://localhost:{client.port}/v1",
        api_key=client.key or "none",
        http_client=openai.DefaultHttpxClient(verify=trust),
        max_retries=0,
    )


def ask(client: openai.OpenAI, max_tokens: int) -> str:
    stream = client.completions.create(
        model="pylm",
        prompt=PROMPT,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_openais_client_gets_what_the_servers_gets(deployment: Deployment) -> None:
    client = openais(deployment)
    assert "pylm" in {model.id for model in client.models.list()}
    events = deployment.client().stream(100)
    assert ask(client, 100) == "".join(event["text_output"] for _, event in events)
    assert deployment.client("").request("GET", "/health")[0] == 200
    with pytest.raises(openai.AuthenticationError, match="API key"):
        ask(openais(deployment, ""), 1)


def test_tokens_are_counted_by_the_name_of_the_key(deployment: Deployment) -> None:
    def counted() -> float:
        name = 'sum(jitney_gateway_generated_tokens_total{model="pylm",key="limited"})'
        return sum(float(each["value"][1]) for each in deployment.query(name))

    before = counted()
    ask(openais(deployment, "limited"), 37)
    wait_for(lambda: counted() == before + 37, "the tokens of that key", 60)


def test_a_key_that_is_new_is_known_without_a_restart(deployment: Deployment) -> None:
    file = deployment.project / "deploy" / "secrets" / "api_keys"
    before = file.read_text(encoding="utf-8")
    client = openais(deployment)
    client.api_key = "N" * 32
    try:
        file.write_text(f"{before}new:{client.api_key}\n", encoding="utf-8")
        deployment.run_in("proxy", "reload-keys")

        def is_known() -> bool:
            with contextlib.suppress(openai.AuthenticationError):
                return bool(client.models.list().data)
            return False

        wait_for(is_known, "the new key to be known", 60, lambda: deployment.logs("gateway"))
    finally:
        file.write_text(before, encoding="utf-8")
        deployment.run_in("proxy", "reload-keys")


@pytest.mark.parametrize("service", ["gateway", "triton-cpu"])
def test_an_image_can_send_traces(deployment: Deployment, service: str) -> None:
    program = (
        "from jitney.tracing import Tracing; Tracing('http://127.0.0.1:1', 'x'); print('it can')"
    )
    assert deployment.run_in(service, "/opt/jitney/bin/python", "-c", program) == "it can\n"


@pytest.fixture
def two(deployment: Deployment) -> Iterator[list[str]]:
    """The containers of two gateways, healthy; one of them is new."""

    def healthy() -> bool:
        states = [json.loads(deployment.engine.docker("inspect", each).stdout) for each in ids()]
        return all(made["State"]["Health"]["Status"] == "healthy" for (made,) in states)

    def ids() -> list[str]:
        return deployment.container("gateway").split()

    try:
        deployment.shell(document_block("--scale gateway=2").text)
        wait_for(lambda: len(ids()) == 2 and healthy(), "two gateways", 120)
        yield ids()
    finally:
        deployment.compose("up", "--detach", "--no-build", "--scale", "gateway=1", "gateway")
        deployment.wait_healthy("gateway")


def test_a_batch_goes_on_when_one_of_two_gateways_is_stopped(
    deployment: Deployment, two: list[str]
) -> None:
    client = openais(deployment)
    body: dict[str, Any] = {"model": "pylm", "prompt": PROMPT, "max_tokens": 96, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body})
        for n in range(400)
    ]
    file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )

    def at_work() -> list[str]:
        return [each for each in two if works(deployment, each)]

    wait_for(at_work, "one of them to take it", 60)
    (first,) = at_work()
    deployment.engine.docker("stop", "--time", "60", first, timeout_s=90)
    assert client.batches.retrieve(batch.id).status == "in_progress"  # the other one answers
    wait_for(
        lambda: client.batches.retrieve(batch.id).status == "completed",
        "the batch",
        180,
        lambda: deployment.engine.docker("logs", next(e for e in two if e != first)).stderr,
    )
    done = client.batches.retrieve(batch.id)
    assert done.output_file_id is not None
    got = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert sorted(int(line["custom_id"]) for line in got) == list(range(400))


def works(deployment: Deployment, container: str) -> bool:
    """Whether this one has the folder's lock: the kernel shows a container its own alone."""
    locks = deployment.engine.docker("exec", container, "cat", "/proc/locks").stdout
    return "FLOCK" in locks

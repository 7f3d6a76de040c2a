"""OpenAI's lines that are run in the job's process: what the service takes, in its form. What the
fields of a body do is tested with the gateway, whose functions read them."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jitney import LLM, SamplingParams
from jitney.errors import InvalidArgumentError

from tests.jobs.job_rows import bad, read, run, write_lines
from tests.jobs.test_generate_job import ENGINE
from tests.jobs.test_tensor_jobs import EMBEDDER, built
from tests.tiny_models import make_checkpoint

CHAT = [{"role": "user", "content": "the bus"}]
CHAT_URL = "/v1/chat/completions"
TEXT_URL = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lines") / "llama", "llama", tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **ENGINE) as llm:
        yield llm


class Lines:
    """A job of lines, and what it has made."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self.folder = folder
        self.path = tmp_path
        self.rows: list[dict[str, Any]] = []

    def add(self, custom_id: str, url: str, **body: Any) -> None:
        body = {"model": "m", "temperature": 0, **body}
        line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
        self.rows.append(line)

    def run(self, **settings: Any) -> dict[str, Any]:
        """The bodies of the good lines, by their ids."""
        source = write_lines(self.path / "in.jsonl", self.rows)
        given = {"task": "generate", "map": None, "model": str(self.folder), "engine": ENGINE}
        given |= {"input_format": "openai", **settings}
        assert run(source, self.path / "out", **given)
        made = {}
        for row in read(self.path / "out"):
            assert row.keys() == {"id", "custom_id", "response", "error"}
            assert row["error"] is None
            assert row["response"]["status_code"] == 200
            made[row["custom_id"]] = row["response"]["body"]
        return made

    def failures(self) -> dict[str, dict[str, Any]]:
        return {row["custom_id"]: row for row in bad(self.path / "out")}


@pytest.fixture
def lines(folder: Path, tmp_path: Path) -> Lines:
    return Lines(folder, tmp_path)


def test_prompts_in_every_form(lines: Lines, llm: LLM) -> None:
    """A text, token ids, lists of both: a choice for each of ``n`` for each prompt."""
    texts = ["the bus", "Zürich"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    lines.add("text", TEXT_URL, prompt=texts[0], max_tokens=4)
    lines.add("ids", TEXT_URL, prompt=ids[0], max_tokens=4)
    lines.add("texts", TEXT_URL, prompt=texts, max_tokens=4)
    lines.add("lists", TEXT_URL, prompt=ids, max_tokens=4)
    lines.add("n", TEXT_URL, prompt=texts, max_tokens=4, n=2, temperature=1, seed=3)
    lines.add("many", TEXT_URL, prompt=texts * 20, max_tokens=1)
    made = lines.run()
    assert not lines.failures()
    params = SamplingParams(temperature=0, max_tokens=4)
    first, second = (each.text for each in llm.generate(texts, params, progress=False))
    for name, expected in (
        ("text", [first]),
        ("ids", [first]),
        ("texts", [first, second]),
        ("lists", [first, second]),
    ):
        choices = made[name]["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(expected)))
        assert [choice["text"] for choice in choices] == expected
    assert made["texts"]["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])
    assert made["texts"]["object"] == "text_completion"
    pairs = llm.generate(texts, SamplingParams(n=2, max_tokens=4, seed=3), progress=False)
    expected = [sequence.text for pair in pairs for sequence in pair.sequences]
    assert [choice["text"] for choice in made["n"]["choices"]] == expected
    assert len(made["many"]["choices"]) == 40


def test_what_a_chat_may_have(lines: Lines, llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    lines.add("chat", CHAT_URL, messages=CHAT, max_completion_tokens=6)
    lines.add("parts", CHAT_URL, messages=[{**CHAT[0], "content": [{"type": "text", "text": "a"}]}])
    lines.add("schema", CHAT_URL, messages=CHAT, response_format=answer, max_tokens=60)
    lines.add("logprobs", CHAT_URL, messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2)
    lines.add("no tools", CHAT_URL, messages=CHAT, max_tokens=1, tools=[], metadata={"a": "b"})
    lines.add("to the end", CHAT_URL, messages=CHAT, user="u", store=False, stream=True)
    lines.add("response", "/v1/responses", input="the bus", max_output_tokens=4)
    made = lines.run()
    assert not lines.failures()
    (direct,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=6), progress=False)
    (choice,) = made["chat"]["choices"]
    assert choice["message"]["content"] == direct.text
    assert choice["finish_reason"] == "length"
    assert made["chat"]["model"] == "m"
    assert made["chat"]["usage"]["completion_tokens"] == 6
    assert json.loads(made["schema"]["choices"][0]["message"]["content"]) == {"a": 1}
    logprobs = made["logprobs"]["choices"][0]["logprobs"]["content"]
    assert len(logprobs) == 3
    for position in logprobs:
        assert len(position["top_logprobs"]) == 2
        assert position["logprob"] <= 0
    assert made["to the end"]["usage"]["completion_tokens"] > 6
    assert made["response"]["object"] == "response"
    assert made["response"]["usage"]["output_tokens"] == 4


def test_logprobs_and_echo_of_completions(lines: Lines, llm: LLM) -> None:
    lines.add("new", TEXT_URL, prompt="the bus", max_tokens=3, logprobs=1)
    lines.add("both", TEXT_URL, prompt="the bus", max_tokens=2, logprobs=0, echo=True)
    lines.add("prompt", TEXT_URL, prompt="the bus", max_tokens=0, logprobs=0, echo=True)
    lines.add("asked", TEXT_URL, prompt="the bus", max_tokens=1, prompt_logprobs=1)
    made = lines.run()
    assert not lines.failures()
    number = len(llm.tokenizer.encode("the bus"))
    for name, tokens in (("new", 3), ("both", number + 2), ("prompt", number)):
        logprobs = made[name]["choices"][0]["logprobs"]
        assert {len(values) for values in logprobs.values()} == {tokens}
    assert made["both"]["choices"][0]["text"].startswith("the bus")
    assert made["prompt"]["choices"][0]["text"] == "the bus"
    assert len(made["asked"]["choices"][0]["prompt_logprobs"]) == number


def test_defaults_of_the_job(lines: Lines) -> None:
    """A limit of the line replaces the job's, by whatever name."""
    lines.add("none", CHAT_URL, messages=CHAT)
    lines.add("own", CHAT_URL, messages=CHAT, max_completion_tokens=3)
    made = lines.run(max_tokens=5)
    assert made["none"]["usage"]["completion_tokens"] == 5
    assert made["own"]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (CHAT_URL, {}, "messages"),
        (CHAT_URL, {"messages": []}, "messages"),
        (CHAT_URL, {"messages": CHAT, "temperature": "hot"}, "temperature"),
        (CHAT_URL, {"messages": CHAT, "n": 0}, "n"),
        (CHAT_URL, {"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        (CHAT_URL, {"messages": CHAT, "max_tokens": 10**6}, None),
        (TEXT_URL, {"prompt": []}, "prompt"),
        (TEXT_URL, {"prompt": [10**6]}, "prompt"),
        (TEXT_URL, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT_URL, {"prompt": "a", "guided_regex": "("}, "guided_regex"),
    ],
)
def test_a_body_at_fault_is_refused_as_by_the_service(
    lines: Lines, url: str, body: dict[str, Any], param: str | None
) -> None:
    lines.add("wrong", url, **body)
    lines.add("right", CHAT_URL, messages=CHAT, max_tokens=1)
    assert lines.run().keys() == {"right"}
    failure = lines.failures()["wrong"]
    assert failure["error"] is None
    assert failure["row"] == 0
    assert failure["input"]["custom_id"] == "wrong"
    response = failure["response"]
    assert response["status_code"] == 400
    error = response["body"]["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_value"
    if param is not None:
        assert error["param"] == param


def test_lines_at_fault(lines: Lines) -> None:
    lines.add("url", "/v1/embeddings", input="x")
    lines.add("method", TEXT_URL, prompt="x")
    lines.rows[-1]["method"] = "GET"
    lines.add("a", TEXT_URL, prompt="x", max_tokens=1)
    lines.add("a", TEXT_URL, prompt="again", max_tokens=1)
    lines.rows += [{"custom_id": "short"}, {"custom_id": 5}]
    assert lines.run().keys() == {"a"}
    codes = {key: failure["error"]["code"] for key, failure in lines.failures().items()}
    assert codes == {
        "url": "invalid_url",
        "method": "invalid_method",
        "a": "duplicate_custom_id",
        "short": "missing_required_parameter",
        5: "missing_required_parameter",
    }


def test_the_lines_name_the_model(lines: Lines) -> None:
    lines.add("a", TEXT_URL, prompt="x", max_tokens=1, model=str(lines.folder))
    made = lines.run(model=None)
    assert made["a"]["model"] == str(lines.folder)


def test_lines_that_name_several_models_are_told_so(lines: Lines) -> None:
    for name in "aab":
        lines.add(f"{len(lines.rows)}", TEXT_URL, prompt="x", model=name)
    said = r"the lines name 2 models: 'a' \(2\), 'b' \(1\); .* setting model"
    with pytest.raises(InvalidArgumentError, match=said):
        lines.run(model=None)
    for row in lines.rows:
        del row["body"]["model"]
    with pytest.raises(InvalidArgumentError, match="the lines name no model"):
        lines.run(model=None)


@built
def test_embeddings(tmp_path: Path) -> None:
    """Of an exported model: texts, token ids, lists of them, base64."""
    lines = Lines(EMBEDDER, tmp_path)
    url = "/v1/embeddings"
    lines.add("one", url, input="a bus")
    lines.add("two", url, input=["a bus", "a car there"])
    lines.add("ids", url, input=[1, 2])
    lines.add("base64", url, input="a bus", encoding_format="base64")
    lines.add("short", url, input="a bus", dimensions=1)
    lines.add("none", url, input="")
    lines.add("chat", CHAT_URL, messages=CHAT)
    for row in lines.rows:
        del row["body"]["temperature"]
    made = lines.run(task="embed", engine={})
    assert made.keys() == {"one", "two", "ids", "base64"}
    (first,) = made["one"]["data"]
    assert first["object"] == "embedding"
    assert [each["index"] for each in made["two"]["data"]] == [0, 1]
    assert made["two"]["data"][0]["embedding"] == pytest.approx(first["embedding"])
    encoded = base64.b64decode(made["base64"]["data"][0]["embedding"])
    assert np.frombuffer(encoded, "<f4") == pytest.approx(first["embedding"])
    assert made["one"]["usage"]["prompt_tokens"] > 0
    failures = lines.failures()
    assert failures.keys() == {"short", "none", "chat"}
    assert failures["short"]["response"]["body"]["error"]["param"] == "dimensions"
    assert failures["chat"]["error"]["code"] == "invalid_url"

"""Libraries, unmodified, against the gateway: the examples of their own pages, with only base URL,
key and model changed. Each client's script prints what came; here stands what must be true of it,
whatever words a random model says."""

from typing import Any

from tests.gateway.clients.conftest import Asked, Run, find, last_line, needs

CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EVENTS = {
    "message_start", "content_block_start", "content_block_delta", "content_block_stop",
    "message_delta", "message_stop",
}  # fmt: skip
POOLED = [384, 384]
CALLED = ["tool_call_item", "tool_call_output_item", "message_output_item"]


def check_whole(found: dict[str, Any]) -> None:
    """A call without an answer shows as None or an empty text."""
    assert [name for name, value in found.items() if not value] == []


@needs("openai")
def test_openai(run: Run, asked: Asked, refused: set[tuple[str, str]]) -> None:
    refused.add((CHATS, "404"))
    found = last_line(run("openai", "openai_calls.py"))
    check_whole(found)
    assert found["streamed response"][0] == "response.created"
    assert found["streamed response"][-1] == "response.completed"
    assert found["parsed tool"] == "Query"
    assert {"chunk", "content.delta", "content.done"} <= set(found["history"])
    assert "tool_calls.function.arguments.done" in found["history"]
    assert found["conversation"] == ["function_call", "message"]
    assert found["models"] == ["embed", "lm", "rank"]
    assert found["vectors"] == POOLED
    assert "'nobody' does not exist" in found["refused"]


@needs("anthropic")
def test_anthropic(run: Run, asked: Asked) -> None:
    found = last_line(run("anthropic", "anthropic_calls.py"))
    check_whole(found)
    assert set(found["streamed"]) == EVENTS
    assert found["stream helper"][0] == found["stream helper"][1]
    for runner in ("tool runner", "tool runner, streamed"):
        assert found[runner] == [["tool_use"], ["text"]]
    assert found["count"] > 5
    assert "lm" in found["models"]


@needs("instructor")
def test_instructor(run: Run, asked: Asked) -> None:
    found = last_line(run("instructor", "instructor_calls.py"))
    check_whole(found)
    assert len(found) == 19
    users = [user if isinstance(user, dict) else user[0] for user in found.values()]
    assert all(isinstance(user["age"], int) for user in users)
    assert asked() == {CHATS, RESPONSES, MESSAGES}


@needs("langchain-openai")
def test_langchain(run: Run, asked: Asked) -> None:
    found = last_line(run("langchain-openai", "langchain_calls.py"))
    check_whole(found)
    assert found["stream"]["text"]
    assert found["responses, stream"]["usage"]["output_tokens"] > 0
    for kind in ("tools", "strict tools", "responses, tools"):
        assert found[kind]
        assert set(found[kind]) <= {"GetWeather", "GetPopulation"}
    for kind in ("structured", "responses, structured"):
        assert set(found[kind]["json_schema"]) == {"setup", "punchline", "rating"}
    assert found["logprobs"]
    assert found["query"] == 384
    assert found["documents"] == POOLED


@needs("langchain-openai")
@needs("llama-index")
def test_langchain_sends_ids_of_another_tokenizer(
    run: Run, asked: Asked, refused: set[tuple[str, str]]
) -> None:
    """Unless told otherwise: its vectors mean nothing, and an id that the model has not is refused.
    What tiktoken would download is the file that llama-index's package has."""
    refused.add(("/v1/embeddings", "400"))
    (file,) = find("llama-index").parents[1].rglob("9b5ad71b2ce5302211f9c61530b329a4922fc6a4")
    found = last_line(
        run("langchain-openai", "tiktoken_calls.py", TIKTOKEN_CACHE_DIR=str(file.parent))
    )
    assert found["vector"] == 384
    assert "of the model's own tokenizer" in found["refused"]


@needs("llama-index")
def test_llama_index(run: Run, asked: Asked) -> None:
    found = last_line(run("llama-index", "llama_index_calls.py"))
    check_whole(found)
    assert set(found["structured"]) == set(found["response_format"]) == {"name", "artist"}
    assert found["batch"] == POOLED


@needs("pydantic-ai")
def test_pydantic_ai(run: Run, asked: Asked) -> None:
    found = last_line(run("pydantic-ai", "pydantic_ai_calls.py"))
    for answers in found.values():
        check_whole(answers)
        assert "tool-return" in answers["text"]["parts"]
        for kind in answers.keys() & {"tool output", "native output"}:
            assert 0 <= answers[kind]["output"]["risk"] <= 10
    assert asked() == {CHATS, RESPONSES, MESSAGES}


@needs("openai-agents")
def test_openai_agents(run: Run, asked: Asked) -> None:
    found = last_line(run("openai-agents", "openai_agents_calls.py"))
    for answers in found.values():
        assert answers["tools"] == [
            "tool_call_item",
            "tool_call_output_item",
            "message_output_item",
        ]
        assert set(answers["structured"]) == {"name", "date", "participants"}
    assert asked() == {CHATS, RESPONSES}


@needs("outlines")
def test_outlines(run: Run, asked: Asked) -> None:
    found = last_line(run("outlines", "outlines_calls.py"))
    check_whole(found)
    assert found["sentiment"] in ("Positive", "Negative", "Neutral")
    assert found["stream"] in ("Positive", "Negative", "Neutral")
    assert isinstance(int(found["temperature"]), int)
    assert found["regex"].count(".") == 3


@needs("guidance")
def test_guidance(run: Run, asked: Asked) -> None:
    found = last_line(run("guidance", "guidance_calls.py"))
    check_whole(found)
    assert found["select"] in ("Stockholm", "Oslo")
    assert found["regex"].isdigit()
    for kind in ("json", "vllm, json"):
        assert 300 < found[kind]["systolic"] <= 400


@needs("litellm")
def test_litellm(run: Run, asked: Asked) -> None:
    """More of it stands in tests/server_perf/test_gateway_clients.py."""
    found = last_line(run("litellm", "litellm_sdk_calls.py", LITELLM_LOCAL_MODEL_COST_MAP="True"))
    check_whole(found)
    for kind in ("messages", "messages by openai"):
        assert found[kind][0]
        assert "event: message_stop" in found[kind][1]
    assert found["ranks"] == [1, 0]
    assert asked() == {CHATS, MESSAGES, RESPONSES, "/v1/rerank"}

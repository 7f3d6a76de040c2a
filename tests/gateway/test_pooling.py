"""Answers of models that give a vector for a text, without a server."""

import asyncio
from typing import Any

import numpy as np
import pytest
from jitney_gateway.pooling import classify, embed, rerank, rerank_for_cohere, score
from jitney_gateway.pooling_bodies import (
    ClassifyRequest,
    Document,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from jitney_gateway.refusals import FieldError
from jitney_gateway.server_client import ServedModel


class OneVector:
    """In place of a server, whose model gives the same vector for any text."""

    def __init__(self, vector: list[float]) -> None:
        self._vector = np.array(vector, np.float32)

    async def infer(self, model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": self._vector}


@pytest.mark.parametrize(
    ("vector", "labels", "label"),
    [
        ([0.25, 0.5], "no, yes", "yes"),
        ([0.25, 0.5], "no", "1"),
        ([0.25, 0.5], None, "1"),
        ([0.5], "yes", "yes"),
        ([0.5], None, "0"),
    ],
)
def test_a_class_without_a_label_is_called_by_its_index(
    vector: list[float], labels: str | None, label: str
) -> None:
    config: dict[str, Any] = {"input": [{"name": "x"}]}
    if labels is not None:
        config["parameters"] = {"openai_labels": {"string_value": labels}}
    model = ServedModel("m", "classify", config, None, 0.0)
    body = ClassifyRequest(model="m", input="a")
    answer = asyncio.run(classify(OneVector(vector), model, body))  # type: ignore[arg-type]
    assert answer["data"] == [
        {"index": 0, "label": label, "num_classes": len(vector), "probs": vector}
    ]


class Counting:
    """In place of a server. A vector has the text's length and its number of "a"; a score is the
    length of the query plus that number. Token ids are a vector of their length and sum."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = config or {}
        self.sent: list[dict[str, np.ndarray]] = []

    async def find_model(self, name: str) -> ServedModel:
        return ServedModel(name, "", self.config, None, 0.0)

    async def infer(self, model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.sent.append(inputs)
        if model == "ids":
            ids = inputs["input_ids"]
            made = np.array([ids.size, ids.sum()], np.float32)
            return {"y": made[None] if ids.ndim == 2 else made}
        *queries, texts = inputs.values()
        counts = np.array([[len(text), text.count(b"a")] for text in texts.reshape(-1)])
        tokens = {"num_tokens": counts[:, :1].astype(np.int64)}
        if queries:
            return {"y": (counts[:, 1] + len(queries[0][0])).astype(np.float32), **tokens}
        return {"y": counts.astype(np.float32) if texts.ndim == 2 else counts[0] * 1.0, **tokens}


def model_of(endpoint: str, inputs: int = 1, batch: int = 0, **parameters: str) -> ServedModel:
    config: dict[str, Any] = {
        "input": [{"name": name} for name in "qd"[:inputs]],
        "max_batch_size": batch,
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }
    return ServedModel("m", endpoint, config, None, 0.0)


def embedded(model: ServedModel, server: Any = None, **body: Any) -> Any:
    request = EmbeddingRequest(model="m", **body)
    return asyncio.run(embed(server or Counting(), model, request))


@pytest.mark.parametrize("batch", [0, 2])
def test_the_tokens_of_embeddings_are_counted(batch: int) -> None:
    answer = embedded(model_of("embeddings", batch=batch), input=["a", "bb", "banana"])
    assert [each["embedding"] for each in answer["data"]] == [[1, 1], [2, 0], [6, 3]]
    assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}


def test_vectors_are_cut_only_if_the_model_was_trained_for_that() -> None:
    plain = model_of("embeddings")
    assert embedded(plain, input="aab", dimensions=2)["data"][0]["embedding"] == [3, 2]
    with pytest.raises(FieldError, match="dimensions is 1, but must be 2"):
        embedded(plain, input="aab", dimensions=1)
    matryoshka = model_of("embeddings", openai_dimensions="1, 4")
    assert embedded(matryoshka, input="aab", dimensions=1)["data"][0]["embedding"] == [1]
    for wrong in (3, 4):
        with pytest.raises(FieldError, match=f"dimensions is {wrong}, but must be 1 or 4 or 2"):
            embedded(matryoshka, input="aab", dimensions=wrong)


@pytest.mark.parametrize(("batch", "shape"), [(0, (2,)), (8, (1, 2))])
def test_token_ids_go_to_the_model_that_takes_them(batch: int, shape: tuple[int, ...]) -> None:
    parameters = {"openai_ids_model": "ids", "openai_vocab_size": "10", "openai_max_ids": "2"}
    model = model_of("embeddings", **parameters)
    server = Counting({"max_batch_size": batch})
    answer = embedded(model, server, input=[[1, 2, 9], [3]])
    assert [each["embedding"] for each in answer["data"]] == [[2, 3], [1, 3]]
    assert answer["usage"]["prompt_tokens"] == 3
    assert server.sent[0]["input_ids"].shape == server.sent[0]["attention_mask"].shape == shape
    assert embedded(model, server, input=[1, 2])["data"][0]["embedding"] == [2, 3]
    with pytest.raises(FieldError, match="input has the token id 10, but ids must be below 10"):
        embedded(model, server, input=[10])
    with pytest.raises(FieldError, match="takes only texts"):
        embedded(model_of("embeddings"), input=[1])
    for mixed in ([1, "a"], [[]], [[1], 2]):
        with pytest.raises(FieldError, match="input must be a text, a list of texts, token ids"):
            embedded(model, server, input=mixed)


def test_ranks_in_the_forms_of_jina_and_cohere() -> None:
    model = model_of("rerank", inputs=2)
    documents: list[Any] = ["b", Document(text="aa"), "a"]
    body = RerankRequest(model="m", query="bus", documents=documents, top_n=2)
    answer = asyncio.run(rerank(Counting(), model, body))  # type: ignore[arg-type]
    ranks = [{"index": 1, "relevance_score": 5.0}, {"index": 2, "relevance_score": 4.0}]
    assert answer["results"] == [
        {**ranks[0], "document": {"text": "aa"}},
        {**ranks[1], "document": {"text": "a"}},
    ]
    assert answer["usage"]["total_tokens"] == 4
    answer = asyncio.run(rerank_for_cohere(Counting(), model, body))  # type: ignore[arg-type]
    assert answer["results"] == ranks
    assert answer["meta"]["api_version"] == {"version": "2"}


@pytest.mark.parametrize(
    ("first", "second", "scores"),
    [
        ("bus", "a", [4]),
        ("bus", ["b", "aa"], [3, 5]),
        (["bus"], ["b", "aa"], [3, 5]),
        (["bus", "b"], ["b", "aa"], [3, 3]),
    ],
)
def test_scores_of_pairs(first: Any, second: Any, scores: list[float]) -> None:
    body = ScoreRequest(model="m", text_1=first, text_2=second)
    answer = asyncio.run(score(Counting(), model_of("rerank", inputs=2), body))  # type: ignore[arg-type]
    assert [each["score"] for each in answer["data"]] == scores
    body = ScoreRequest(model="m", text_1=["a", "b"], text_2=["a", "b", "c"])
    with pytest.raises(FieldError, match="text_1 has 2 texts, but must have one text or 3"):
        asyncio.run(score(Counting(), model_of("rerank", inputs=2), body))  # type: ignore[arg-type]

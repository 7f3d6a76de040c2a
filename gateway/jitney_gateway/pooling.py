"""Embeddings, classes and ranks from models whose config.pbtxt names the endpoint that they serve::

    parameters { key: "openai_endpoint" value { string_value: "embeddings" } }

A model for ``embeddings`` or ``classify`` has one STRING input of one element and one FP32 output
of a vector. The gateway sends each text as a request of its own, or up to ``max_batch_size`` texts
as one request; the server joins requests into batches. A model for ``rerank`` has two inputs, a
query [1] and then its documents [-1], and an FP32 output with a score for each document. Any of
them may have a second output ``num_tokens``, of integers: how many tokens the texts had.

A model for ``embeddings`` may have further parameters:

- ``openai_dimensions``: lengths, with commas between them, to which its vectors may be cut, because
  it was trained so (Matryoshka representation learning, arXiv 2205.13147);
- ``openai_ids_model``: the name of a model that makes vectors of token ids. Its inputs are the
  INT64 tensors ``input_ids`` and ``attention_mask``;
- ``openai_vocab_size``: those token ids must be below this;
- ``openai_max_ids``: so many of them are used, and the rest is left out.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jitney.errors import InternalError

from jitney_gateway.embedding_answer import embedding_answer, inputs_of
from jitney_gateway.pooling_bodies import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from jitney_gateway.refusals import FieldError
from jitney_gateway.server_client import ServedModel, ServerClient
from jitney_gateway.wire import JsonObject

PoolingFunction = Callable[[ServerClient, ServedModel, Any], Awaitable[JsonObject]]
"""``embed``, ``classify``, ``rerank`` and the like: makes the answer to a decoded body."""

_TOKENS_OUTPUT = "num_tokens"


class Answered(NamedTuple):
    """What a model has answered to texts."""

    arrays: list[np.ndarray]
    """Vectors: one for each text. Scores: an array for each request, with one for each document."""
    num_tokens: int
    """Of all texts; 0 if the model does not tell."""


async def embed(server: ServerClient, model: ServedModel, body: EmbeddingRequest) -> JsonObject:
    """The answer of ``/v1/embeddings``."""
    given = inputs_of(body)
    if isinstance(given[0], str):
        found = await _vectors(server, model, given)
    else:
        found = await _vectors_of_ids(server, model, given)
    vectors = [_of_dimensions(whole, body.dimensions, model) for whole in found.arrays]
    return embedding_answer(body, vectors, found.num_tokens)


async def classify(server: ServerClient, model: ServedModel, body: ClassifyRequest) -> JsonObject:
    """The answer of ``/v1/classify``. The model's parameter ``openai_labels`` names the classes,
    with commas between them. Without it a class is called by its index."""
    names = model.parameter("openai_labels")
    labels = names.split(",") if names else []
    texts = [body.input] if isinstance(body.input, str) else body.input
    found = await _vectors(server, model, texts)
    data = []
    for index, vector in enumerate(found.arrays):
        best = int(vector.argmax())
        label = str(best)
        if len(labels) == len(vector):
            label = labels[best].strip()
        entry = {
            "index": index,
            "label": label,
            "num_classes": len(vector),
            "probs": vector.tolist(),
        }
        data.append(entry)
    return {"object": "list", "data": data, "model": body.model, "usage": _usage(found)}


async def rerank(server: ServerClient, model: ServedModel, body: RerankRequest) -> JsonObject:
    """The answer of ``/v1/rerank``: the best documents first."""
    texts = body.texts()
    found = await _scores(server, model, body.query, texts)
    results = _best_first(found.arrays[0], body.top_n)
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return {"model": body.model, "results": results, "usage": _usage(found)}


async def rerank_for_cohere(
    server: ServerClient, model: ServedModel, body: RerankRequest
) -> JsonObject:
    """The answer of ``/v2/rerank``: the same in Cohere's form, which has no documents."""
    found = await _scores(server, model, body.query, body.texts())
    meta = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": found.num_tokens},
    }
    results = _best_first(found.arrays[0], body.top_n)
    return {"id": f"rerank-{secrets.token_hex(12)}", "results": results, "meta": meta}


async def score(server: ServerClient, model: ServedModel, body: ScoreRequest) -> JsonObject:
    """The answer of ``/score``: the scores of pairs, in their order."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) == 1:
        found = await _scores(server, model, first[0], second, fields=("text_1", "text_2"))
        scores = found.arrays[0].tolist()
    elif len(first) == len(second):
        found = await _scores_of_pairs(server, model, first, second)
        scores = [float(array[0]) for array in found.arrays]
    else:
        bound = f"one text or {len(second)}, as many as text_2"
        raise FieldError("text_1", f"text_1 has {len(first)} texts, but must have {bound}")
    data = []
    for index, value in enumerate(scores):
        data.append({"index": index, "object": "score", "score": value})
    return {
        "id": f"score-{secrets.token_hex(12)}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": data,
        "usage": _usage(found),
    }


# ------------------------------------------------------------------------------- scores


def _best_first(scores: np.ndarray, most: int | None) -> list[JsonObject]:
    """The results in the order of their scores, without the documents; at most ``most``, if that is
    not None."""
    best_first = np.argsort(-scores, kind="stable")[:most].tolist()
    return [{"index": index, "relevance_score": float(scores[index])} for index in best_first]


async def _scores_of_pairs(
    server: ServerClient, model: ServedModel, queries: Sequence[str], documents: Sequence[str]
) -> Answered:
    """The scores of each document for the query of the same index: an array of one score each."""
    fields = ("text_1", "text_2")
    requests = []
    for query, document in zip(queries, documents, strict=True):
        requests.append(_scores(server, model, query, [document], fields=fields))
    found = await asyncio.gather(*requests)
    arrays = [each.arrays[0] for each in found]
    return Answered(arrays, sum(each.num_tokens for each in found))


async def _scores(
    server: ServerClient,
    model: ServedModel,
    query: str,
    documents: Sequence[str],
    *,
    fields: tuple[str, str] = ("query", "documents"),
) -> Answered:
    """One array: the score of each document. ``fields``: where the client has sent the two."""
    (query_input, documents_input) = model.config["input"]
    tensors = {
        query_input["name"]: _encoded_texts(fields[0], [query]),
        documents_input["name"]: _encoded_texts(fields[1], documents),
    }
    return _answered([await server.infer(model.name, tensors)])


# ------------------------------------------------------------------------------- vectors


def _of_dimensions(vector: np.ndarray, dimensions: int | None, model: ServedModel) -> np.ndarray:
    """The vector, cut to so many dimensions and scaled to the length 1. Raises FieldError if the
    model was not trained for that."""
    if dimensions is None or dimensions == len(vector):
        return vector
    sizes = model.parameter("openai_dimensions").replace(" ", "").split(",")
    if str(dimensions) not in sizes or dimensions > len(vector):
        bound = " or ".join([*filter(None, sizes), str(len(vector))])
        raise FieldError("dimensions", f"dimensions is {dimensions}, but must be {bound}")
    cut = vector[:dimensions]
    length = float(np.linalg.norm(cut))
    return cut if length == 0 else cut / length


async def _vectors_of_ids(
    server: ServerClient, model: ServedModel, inputs: Sequence[list[int]]
) -> Answered:
    """The vector of each list of token ids. Raises FieldError."""
    name = model.parameter("openai_ids_model")
    if not name:
        reason = f"input has token ids, but model {model.name!r} takes only texts"
        raise FieldError("input", reason)
    vocab_size = int(model.parameter("openai_vocab_size"))
    max_ids = int(model.parameter("openai_max_ids"))
    largest = max(map(max, inputs))
    if largest >= vocab_size:
        bound = f"must be below {vocab_size}, of the model's own tokenizer"
        raise FieldError("input", f"input has the token id {largest}, but ids {bound}")
    ids_model = await server.find_model(name)
    is_batched = int(ids_model.config.get("max_batch_size", 0)) > 0
    num_tokens = 0
    requests = []
    for ids in inputs:
        used_ids = np.array(ids[:max_ids], np.int64)
        num_tokens += used_ids.size
        if is_batched:
            used_ids = used_ids.reshape(1, -1)
        tensors = {"input_ids": used_ids, "attention_mask": np.ones_like(used_ids)}
        requests.append(server.infer(name, tensors))
    found = _answered(await asyncio.gather(*requests))
    vectors = [array.reshape(-1) for array in found.arrays]
    return Answered(vectors, num_tokens)


async def _vectors(server: ServerClient, model: ServedModel, given: Sequence[str]) -> Answered:
    """The output vector of each text."""
    texts = _encoded_texts("input", given)
    max_batch_size = int(model.config.get("max_batch_size", 0))
    if max_batch_size > 0:
        found = await _vectors_of_batches(server, model, texts, max_batch_size)
    else:
        # Each text is a request of its own: its input is [1], and its output is the vector.
        found = await _outputs(server, model, [texts[i : i + 1] for i in range(len(texts))])
    if any(vector.ndim != 1 for vector in found.arrays):
        raise InternalError(f"model {model.name!r} gives no vector for a text")
    return found


async def _vectors_of_batches(
    server: ServerClient, model: ServedModel, texts: np.ndarray, max_batch_size: int
) -> Answered:
    """The vectors from requests of several texts: the input is [texts, 1], and the output has a
    vector for each text."""
    column = texts.reshape(-1, 1)
    starts = range(0, len(texts), max_batch_size)
    inputs = [column[start : start + max_batch_size] for start in starts]
    found = await _outputs(server, model, inputs)
    vectors: list[np.ndarray] = []
    for output in found.arrays:
        vectors += list(output)
    return Answered(vectors, found.num_tokens)


# ------------------------------------------------------------------------------- both


async def _outputs(
    server: ServerClient, model: ServedModel, inputs: Sequence[np.ndarray]
) -> Answered:
    """The output of one request for each of ``inputs``."""
    input_name = model.config["input"][0]["name"]
    requests = [server.infer(model.name, {input_name: array}) for array in inputs]
    return _answered(await asyncio.gather(*requests))


def _answered(outputs: Sequence[Mapping[str, np.ndarray]]) -> Answered:
    """What the outputs of requests say."""
    arrays = []
    num_tokens = 0
    for each in outputs:
        by_name = dict(each)
        tokens = by_name.pop(_TOKENS_OUTPUT, None)
        if tokens is not None:
            num_tokens += int(tokens.sum())
        (array,) = by_name.values()
        arrays.append(array)
    return Answered(arrays, num_tokens)


def _usage(found: Answered) -> JsonObject:
    return {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens}


def _encoded_texts(field: str, texts: Sequence[str]) -> np.ndarray:
    """An array of the texts, as the server takes them. Raises FieldError."""
    try:
        return np.array([text.encode() for text in texts], np.object_)
    except UnicodeEncodeError:
        raise FieldError(field, f"{field} has an unpaired surrogate") from None

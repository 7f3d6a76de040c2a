"""Embeddings, classes and ranks from models whose config.pbtxt names the endpoint that they serve::

    parameters { key: "openai_endpoint" value { string_value: "embeddings" } }

A model for ``embeddings`` or ``classify`` has one STRING input of one element and one FP32 output
of a vector. The gateway sends each text as a request of its own, or up to ``max_batch_size`` texts
as one request; the server joins requests into batches. A model for ``rerank`` has a query [1] and
then its documents [-1] as inputs, and an FP32 score for each document as its output.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jitney.errors import InternalError

from jitney_gateway.refusals import FieldError
from jitney_gateway.server_client import ServedModel, ServerClient
from jitney_gateway.wire import ClassifyRequest, EmbeddingRequest, JsonObject, RerankRequest

PoolingFunction = Callable[[ServerClient, ServedModel, Any], Awaitable[JsonObject]]
"""``embed``, ``classify`` or ``rerank``: makes the answer to a decoded body."""

_NO_USAGE = {"prompt_tokens": 0, "total_tokens": 0}
"""The model has its tokenizer inside and does not tell how many tokens there were."""


async def embed(server: ServerClient, model: ServedModel, body: EmbeddingRequest) -> JsonObject:
    """The answer of ``/v1/embeddings``."""
    data = []
    for index, vector in enumerate(await _vectors(server, model, body.input)):
        embedding: Any = vector.tolist()
        if body.encoding_format == "base64":
            embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    return {"object": "list", "data": data, "model": body.model, "usage": _NO_USAGE}


async def classify(server: ServerClient, model: ServedModel, body: ClassifyRequest) -> JsonObject:
    """The answer of ``/v1/classify``. The model's parameter ``openai_labels`` names the classes,
    with commas between them. Without it a class is called by its index."""
    names = _parameter(model.config, "openai_labels")
    labels = names.split(",") if names else []
    data = []
    for index, vector in enumerate(await _vectors(server, model, body.input)):
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
    return {"object": "list", "data": data, "model": body.model, "usage": _NO_USAGE}


async def rerank(server: ServerClient, model: ServedModel, body: RerankRequest) -> JsonObject:
    """The answer of ``/v1/rerank``: the best documents first."""
    query_name, documents_name = (tensor["name"] for tensor in model.config["input"])
    tensors = {
        query_name: _encoded_texts("query", [body.query]),
        documents_name: _encoded_texts("documents", body.documents),
    }
    outputs = await server.infer(body.model, tensors)
    (scores,) = outputs.values()
    best_first = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    results = []
    for index in best_first:
        result: JsonObject = {"index": index, "relevance_score": float(scores[index])}
        if body.return_documents is not False:
            result["document"] = {"text": body.documents[index]}
        results.append(result)
    return {"model": body.model, "results": results, "usage": _NO_USAGE}


async def _vectors(
    server: ServerClient, model: ServedModel, given: str | list[str]
) -> Sequence[np.ndarray]:
    """The output vector of each text."""
    texts = _encoded_texts("input", [given] if isinstance(given, str) else given)
    max_batch_size = int(model.config.get("max_batch_size", 0))
    if max_batch_size > 0:
        vectors = await _vectors_of_batches(server, model, texts, max_batch_size)
    else:
        # Each text is a request of its own: its input is [1], and its output is the vector.
        vectors = await _outputs(server, model, [texts[i : i + 1] for i in range(len(texts))])
    if any(vector.ndim != 1 for vector in vectors):
        raise InternalError(f"model {model.name!r} gives no vector for a text")
    return vectors


async def _vectors_of_batches(
    server: ServerClient, model: ServedModel, texts: np.ndarray, max_batch_size: int
) -> list[np.ndarray]:
    """The vectors from requests of several texts: the input is [texts, 1], and the output has a
    vector for each text."""
    column = texts.reshape(-1, 1)
    starts = range(0, len(texts), max_batch_size)
    inputs = [column[start : start + max_batch_size] for start in starts]
    vectors: list[np.ndarray] = []
    for output in await _outputs(server, model, inputs):
        vectors += list(output)
    return vectors


async def _outputs(
    server: ServerClient, model: ServedModel, inputs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The output of one request for each of ``inputs``."""
    input_name = model.config["input"][0]["name"]
    requests = [server.infer(model.name, {input_name: array}) for array in inputs]
    arrays = []
    for outputs in await asyncio.gather(*requests):
        (output,) = outputs.values()
        arrays.append(output)
    return arrays


def _encoded_texts(field: str, texts: list[str]) -> np.ndarray:
    """An array of the texts, as the server takes them. Raises FieldError."""
    try:
        return np.array([text.encode() for text in texts], np.object_)
    except UnicodeEncodeError:
        raise FieldError(field, f"{field} has an unpaired surrogate") from None


def _parameter(config: Mapping[str, Any], name: str) -> str:
    """A parameter of config.pbtxt; empty if it is not there."""
    return config.get("parameters", {}).get(name, {}).get("string_value", "")

"""Embeddings, scores and classes from models whose config.pbtxt names the endpoint that they serve.

    parameters { key: "openai_endpoint" value { string_value: "embeddings" } }

``embeddings`` and ``classify``: one STRING input of one element and one FP32 output of a vector.
Every text is a request of its own, or a part of one up to ``max_batch_size``: the server joins them
into batches. ``rerank``: a query [1], then its documents [-1], and an FP32 score for each.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jitney.errors import InternalError

from jitney_gateway.refusals import FieldError
from jitney_gateway.server_client import ServedModel, ServerClient
from jitney_gateway.wire import ClassifyRequest, EmbeddingRequest, RerankRequest

JsonObject = dict[str, Any]
Pool = Callable[[ServerClient, ServedModel, Any], Awaitable[JsonObject]]
"""One of the functions below: makes the answer to a decoded body."""

_NO_TOKENS = {"prompt_tokens": 0, "total_tokens": 0}
"""The tokenizer is the model's own: nobody counts."""


async def embed(backend: ServerClient, model: ServedModel, body: EmbeddingRequest) -> JsonObject:
    """The answer of ``/v1/embeddings``."""
    data = []
    for index, vector in enumerate(await _vectors(backend, model, body.input)):
        coded: Any = vector.tolist()
        if body.encoding_format == "base64":
            coded = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": coded})
    return {"object": "list", "data": data, "model": body.model, "usage": _NO_TOKENS}


async def classify(backend: ServerClient, model: ServedModel, body: ClassifyRequest) -> JsonObject:
    """The answer of ``/v1/classify``. The model's parameter ``openai_labels`` names the classes,
    with commas between them; else they are numbers."""
    labels = _parameter(model.config, "openai_labels").split(",")
    data = []
    for index, vector in enumerate(await _vectors(backend, model, body.input)):
        best = int(vector.argmax())
        label = labels[best].strip() if len(labels) == len(vector) else str(best)
        said = {"index": index, "label": label, "num_classes": len(vector)}
        data.append({**said, "probs": vector.tolist()})
    return {"object": "list", "data": data, "model": body.model, "usage": _NO_TOKENS}


async def rerank(backend: ServerClient, model: ServedModel, body: RerankRequest) -> JsonObject:
    """The answer of ``/v1/rerank``: the best documents first."""
    query, documents = (each["name"] for each in model.config["input"])
    tensors = {query: _texts("query", [body.query]), documents: _texts("documents", body.documents)}
    (scores,) = (await backend.infer(body.model, tensors)).values()
    order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    results = [{"index": index, "relevance_score": float(scores[index])} for index in order]
    if body.return_documents is not False:
        results = [{**one, "document": {"text": body.documents[one["index"]]}} for one in results]
    return {"model": body.model, "results": results, "usage": _NO_TOKENS}


async def _vectors(
    backend: ServerClient, model: ServedModel, given: str | list[str]
) -> Sequence[np.ndarray]:
    """One for each text."""
    array = _texts("input", [given] if isinstance(given, str) else given)
    name = model.config["input"][0]["name"]
    most = int(model.config.get("max_batch_size", 0))
    parts = [array[i : i + (most or 1)] for i in range(0, len(array), most or 1)]
    asked = [backend.infer(model.name, {name: part[:, None] if most else part}) for part in parts]
    found: list[np.ndarray] = []
    for answer in await asyncio.gather(*asked):
        (output,) = answer.values()
        found += list(output if most else output[None])
    if any(vector.ndim != 1 for vector in found):
        raise InternalError(f"model {model.name!r} gives no vector for a text")
    return found


def _texts(field: str, texts: list[str]) -> np.ndarray:
    try:
        return np.array([text.encode() for text in texts], np.object_)
    except UnicodeEncodeError:
        raise FieldError(field, f"{field} has an unpaired surrogate") from None


def _parameter(config: Mapping[str, Any], name: str) -> str:
    return config.get("parameters", {}).get(name, {}).get("string_value", "")

"""The answer of ``/v1/embeddings`` from vectors. Pure."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from jitney_gateway.pooling_bodies import MAX_TEXTS, EmbeddingRequest
from jitney_gateway.refusals import FieldError
from jitney_gateway.texts_or_ids import texts_or_ids
from jitney_gateway.wire import JsonObject


def inputs_of(body: EmbeddingRequest) -> list[Any]:
    """The texts, or the lists of token ids. Raises FieldError."""
    given = texts_or_ids("input", body.input)
    if len(given) > MAX_TEXTS:
        raise FieldError("input", f"input has {len(given)} texts, but at most {MAX_TEXTS}")
    return given


def embedding_answer(
    body: EmbeddingRequest, vectors: Sequence[np.ndarray], num_tokens: int
) -> JsonObject:
    """``vectors``: one [dimensions] for each input. ``num_tokens``: of all inputs."""
    data = []
    for index, vector in enumerate(vectors):
        embedding: Any = vector.tolist()
        if body.encoding_format == "base64":
            embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}

"""Answers of models that give a vector for a text, without a server."""

import asyncio
from typing import Any

import numpy as np
import pytest
from jitney_gateway.pooling import classify
from jitney_gateway.server_client import ServedModel
from jitney_gateway.wire import ClassifyRequest


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

"""The stateful model of these tests: a running sum per sequence, under the sequence batcher.

Copied into the repository as ``1/model.py`` by ``models.write_accumulator``. With the strategy
``direct`` a sequence owns a row of the batch and the sum is kept by row alone: were sequences to
share rows, their sums would mix. With ``oldest`` it is kept by the correlation id.
"""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Adds each request's value to its sequence's sum and answers with that."""

    def initialize(self, args: dict[str, str]) -> None:
        """Sums are kept by row or by correlation id, as the configured strategy demands."""
        config = json.loads(args["model_config"])
        self.by_row = "direct" in config["sequence_batching"]
        self.sums: dict[int, int] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """One request per sequence; a row without one is not ready, and its sum stays."""
        responses = []
        for row, request in enumerate(requests):
            value, start, end, ready, sequence = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().item()
                for name in ("VALUE", "START", "END", "READY", "CORRID")
            )
            key = row if self.by_row else sequence
            if ready:
                if start:
                    self.sums[key] = 0
                self.sums[key] += value
            total = np.array([[self.sums.get(key, 0)]], np.int32)
            if ready and end:
                del self.sums[key]
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("SUM", total),
                        pb_utils.Tensor("ROWS", np.array([[len(requests)]], np.int32)),
                    ]
                )
            )
        return responses

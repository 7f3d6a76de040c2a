"""A Python model for the server that calls transformers' ``generate`` on whatever it is handed.

All rows of all requests of one call become one batch, padded on the left; it runs until the
longest answer in it is complete, and every request gets its own part of the result. With the
dynamic batcher in front this is dynamic batching of a language model; where the batcher waits for
full batches, it is static batching. ``benchmarks.batching.language`` copies this file into a model
repository. Parameters of the model's configuration: ``checkpoint``, a folder, and ``threads``.
"""

import json
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, GenerationConfig

UNUSED = -1
"""Fills the rows of an answer beyond their length."""


class TritonPythonModel:
    """Inputs, for each row: ``input_ids`` i32 [length], of which the first ``prompt_tokens`` count,
    and ``max_tokens``. Output: ``output_ids`` i32 [longest of the request]."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint in bf16."""
        parameters = json.loads(args["model_config"])["parameters"]
        torch.set_num_threads(int(parameters["threads"]["string_value"]))
        self._model = AutoModelForCausalLM.from_pretrained(
            parameters["checkpoint"]["string_value"], dtype=torch.bfloat16
        ).eval()

    def execute(self, requests: list[Any]) -> list[Any]:
        """One batch out of all requests."""
        rows = [_rows(request) for request in requests]
        answers = iter(self._generate([row for part in rows for row in part]))
        return [_response([next(answers) for _ in part]) for part in rows]

    def _generate(self, rows: list[tuple[np.ndarray, int]]) -> list[np.ndarray]:
        longest = max(len(prompt) for prompt, _ in rows)
        new = max(count for _, count in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(rows):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, longest - len(prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )
        output = self._model.generate(ids, attention_mask=mask, generation_config=config)
        made = output[:, longest:].numpy().astype(np.int32)
        return [made[row, :count] for row, (_, count) in enumerate(rows)]


def _rows(request: Any) -> list[tuple[np.ndarray, int]]:
    """(prompt, tokens wanted) of each row of a request."""

    def tensor(name: str) -> np.ndarray:
        array: np.ndarray = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
        return array

    lengths = tensor("prompt_tokens")[:, 0]
    max_tokens = tensor("max_tokens")[:, 0]
    return [
        (ids[:length], int(count))
        for ids, length, count in zip(tensor("input_ids"), lengths, max_tokens, strict=True)
    ]


def _response(answers: list[np.ndarray]) -> Any:
    output = np.full((len(answers), max(map(len, answers))), UNUSED, np.int32)
    for row, answer in enumerate(answers):
        output[row, : len(answer)] = answer
    return pb_utils.InferenceResponse([pb_utils.Tensor("output_ids", output)])

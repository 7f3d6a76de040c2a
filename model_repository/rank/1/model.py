"""Scores of passages against a query: cosine similarity of their sentence embeddings.

Asks the ensemble `embed`, as a client would, from inside the server (business logic scripting). The
texts of a request are sorted by length and cut into inner requests of similar lengths, so that a
long passage does not make short ones pay for its padding; the inner requests of all requests run at
once, and the server's dynamic batchers join them.

`execute` only hands requests to an event loop in a thread of its own and returns: one instance
keeps many requests waiting for the encoder at once. An inner request blocks one of a fixed number
of threads; `embed` never waits for `rank`, so none can wait in a circle.
"""

import asyncio
import json
import re
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

EMBED = "embed"
SHORT_BYTES = 64
"""Below this, lengths count as equal: such texts fit the smallest buckets."""


class RequestError(ValueError):
    """What is wrong with a request, in the client's own terms."""


class InnerError(RuntimeError):
    """An inner model refused or failed; the message is its own."""


class TritonPythonModel:
    """Called by the server's stub."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Read the parameters and start the event loop. Raises TritonModelException."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._max_passages = read_parameter(parameters, "max_passages")
        self._inner_batch = read_parameter(parameters, "inner_batch")
        inner_requests = read_parameter(parameters, "max_inner_requests")
        # Requests under way; those beyond wait in the server's queue, under its policies.
        self._slots = threading.BoundedSemaphore(read_parameter(parameters, "max_requests"))
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(inner_requests, "inner"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take the requests over; each is answered through its response sender."""
        for request in requests:
            self._slots.acquire()
            sender = request.get_response_sender()
            asyncio.run_coroutine_threadsafe(self._answer(request, sender), self._loop)

    def finalize(self) -> None:
        """Called when every request was answered."""
        asyncio.run_coroutine_threadsafe(
            self._loop.shutdown_default_executor(), self._loop
        ).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, request: Any, sender: Any) -> None:
        """Exactly one response, whatever happens."""
        try:
            score = await self._score(request)
            response = pb_utils.InferenceResponse([pb_utils.Tensor("score", score)])
        except RequestError as error:
            response = _failure(str(error), pb_utils.TritonError.INVALID_ARG)
        except InnerError as error:
            response = _failure(f"{EMBED}: {error}", pb_utils.TritonError.UNAVAILABLE)
        except Exception:  # the client must hear of it, but not what this machine looks like
            pb_utils.Logger.log_error(f"a ranking failed: {traceback.format_exc()}")
            response = _failure(
                "the ranking failed; the server's log says why", pb_utils.TritonError.INTERNAL
            )
        finally:
            self._slots.release()
        sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _score(self, request: Any) -> np.ndarray:
        """FP32 [passages]."""
        query = pb_utils.get_input_tensor_by_name(request, "query").as_numpy()
        passages = pb_utils.get_input_tensor_by_name(request, "passages").as_numpy()
        if not 1 <= len(passages) <= self._max_passages:
            raise RequestError(
                f"passages has {len(passages)} texts: 1 to {self._max_passages} are allowed"
            )
        texts = [query[0], *passages]
        groups = group_by_length([len(text) for text in texts], self._inner_batch)
        embedded = await asyncio.gather(
            *(self._embed([texts[i] for i in group], group) for group in groups)
        )
        embeddings = np.empty((len(texts), embedded[0].shape[1]), np.float32)
        for group, rows in zip(groups, embedded, strict=True):
            embeddings[group] = rows
        return embeddings[1:] @ embeddings[0]  # they have length 1

    async def _embed(self, texts: Sequence[bytes], indices: Sequence[int]) -> np.ndarray:
        """Their embeddings, FP32 [texts, width]. ``indices`` are those of the texts in the
        request: 0 is the query, i + 1 is passage i."""
        request = pb_utils.InferenceRequest(
            model_name=EMBED,
            requested_output_names=["sentence_embedding"],
            inputs=[pb_utils.Tensor("text", np.array(texts, dtype=object)[:, None])],
        )
        try:
            response = await request.async_exec()
        except pb_utils.TritonModelException as error:
            raise InnerError(str(error)) from None
        if response.has_error():
            raise in_own_terms(response.error().message(), indices)
        return pb_utils.get_output_tensor_by_name(response, "sentence_embedding").as_numpy()


def read_parameter(parameters: dict[str, dict[str, str]], name: str) -> int:
    """A positive number of the model's configuration. Raises TritonModelException."""
    value = parameters.get(name, {}).get("string_value", "")
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise pb_utils.TritonModelException(
            f"parameter {name} is {value!r}: it must be a positive whole number"
        )
    return int(value)


def group_by_length(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Indices of texts, at most ``most`` in a group, no text in it more than twice as long (in
    bytes) as another, unless both are short. The encoder's buckets double in the same way."""
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or len(groups[-1]) == most or lengths[index] > longest:
            groups.append([])
            longest = max(SHORT_BYTES, 2 * lengths[index])
        groups[-1].append(index)
    return groups


def in_own_terms(message: str, indices: Sequence[int]) -> RequestError | InnerError:
    """The error for an inner error. A message about ``text[i]`` gets the client's name for that
    text. (The inner error's code is not returned: the server gives all of them the same.)"""
    match = re.search(r"\btext\[(\d+)\](.*)", message, re.DOTALL)
    if match is None:
        return InnerError(message)
    index = indices[int(match[1])]
    name = "query" if index == 0 else f"passages[{index - 1}]"
    return RequestError(f"{name}{match[2]}")


def _failure(message: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))

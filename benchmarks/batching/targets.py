"""What the load generator sends to: the server, the server behind a client-side queue, a naive one.

Requests are protobuf messages built before the run; answers are kept as they come and compared with
what they must be after it. So within a run the generator only sends and receives.
"""

import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype

from benchmarks.batching.load import Reply
from benchmarks.batching.static_queue import StaticQueue
from benchmarks.batching.subjects import Subject


class Connection:
    """One gRPC channel to the server; belongs to one event loop."""

    def __init__(self, url: str) -> None:
        self.channel = grpc.aio.insecure_channel(url)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    async def __aenter__(self) -> "Connection":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def batches(self, model: str) -> dict[int, int]:
        """Rows of an execution -> executions so far, from the server's statistics."""
        request = service_pb2.ModelStatisticsRequest(name=model)
        response = await self.stub.ModelStatistics(request)
        (stats,) = response.model_stats
        return {batch.batch_size: batch.compute_infer.count for batch in stats.batch_stats}


class ServerTarget:
    """One row a request, to one model of the server."""

    waiting = 0

    def __init__(
        self, connection: Connection, model: str, subject: Subject, *, priority: int | None = None
    ) -> None:
        self.model = model
        self._infer = connection.stub.ModelInfer
        self._subject = subject
        count = len(subject.expected)
        self._requests = [_request(model, subject, [row]) for row in range(count)]
        if priority is not None:
            for request in self._requests:
                request.parameters["priority"].uint64_param = priority

    async def send(self, number: int) -> Reply:
        """Send row ``number`` modulo the number of rows."""
        response = await self._infer(self._requests[number % len(self._requests)])
        return Reply(number, response.raw_output_contents[0])

    def flush(self) -> None:
        """Nothing is held back."""

    def check(self, replies: Sequence[Reply]) -> None:
        """Raise RuntimeError unless every answer is the right one."""
        for reply in replies:
            self._subject.check(reply.number, np.frombuffer(reply.data, np.float32))


class StaticTarget:
    """A client-side queue of full batches in front of a model without a batcher."""

    def __init__(self, connection: Connection, model: str, subject: Subject, size: int) -> None:
        self.model = model
        self._infer = connection.stub.ModelInfer
        self._subject = subject
        self._queue: StaticQueue[Reply] = StaticQueue(size, self._send_batch)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.waiting

    async def send(self, number: int) -> Reply:
        """Wait in the queue until the batch is full."""
        return await self._queue.send(number)

    def flush(self) -> None:
        """The last batch leaves as it is."""
        self._queue.flush()

    def check(self, replies: Sequence[Reply]) -> None:
        """Raise RuntimeError unless every answer is the right one."""
        for reply in replies:
            self._subject.check(reply.number, reply.data)

    async def _send_batch(self, numbers: Sequence[int]) -> list[Reply]:
        response = await self._infer(_request(self.model, self._subject, numbers))
        output = np.frombuffer(response.raw_output_contents[0], np.float32)
        rows = output.reshape(len(numbers), -1)
        return [Reply(number, row) for number, row in zip(numbers, rows, strict=True)]


class NaiveTarget:
    """One row a request as JSON over HTTP, to ``naive_server``."""

    waiting = 0
    model = None

    def __init__(self, session: aiohttp.ClientSession, url: str, subject: Subject) -> None:
        self._session = session
        self._url = f"{url}/predict"
        self._subject = subject
        self._bodies = [
            json.dumps({name: rows[row].tolist() for name, rows in subject.rows.items()}).encode()
            for row in range(len(subject.expected))
        ]

    async def send(self, number: int) -> Reply:
        """Send row ``number`` modulo the number of rows."""
        body = self._bodies[number % len(self._bodies)]
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            response.raise_for_status()
            return Reply(number, await response.read())

    def flush(self) -> None:
        """Nothing is held back."""

    def check(self, replies: Sequence[Reply]) -> None:
        """Raise RuntimeError unless every answer is the right one."""
        for reply in replies:
            self._subject.check(reply.number, np.array(json.loads(reply.data), np.float32))


def _request(model: str, subject: Subject, numbers: Sequence[int]) -> Any:
    """A message with these rows as one batch."""
    request = service_pb2.ModelInferRequest(model_name=model)
    rows = [number % len(subject.expected) for number in numbers]
    for name, values in subject.rows.items():
        request.inputs.add(
            name=name,
            datatype=np_to_triton_dtype(values.dtype),
            shape=[len(rows), *values.shape[1:]],
        )
        request.raw_input_contents.append(values[rows].tobytes())
    request.outputs.add(name=subject.output)
    return request

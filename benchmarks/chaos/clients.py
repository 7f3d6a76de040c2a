"""Four ways to ask a served model: gRPC, two of Triton's HTTP endpoints, and the gateway."""

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from benchmarks.chaos.workload import MODEL, Request

LONGEST_S = 120.0
"""A client that has had no end for so long gives up."""
_FLAGS = ("exclude_input_in_output", "return_finish_reason")


@dataclass(frozen=True)
class Doors:
    """Where clients ask: at the server and its gateway, or at the proxy in front of both."""

    grpc: str
    """``host:port``."""
    http: str
    """Beginning of an address."""
    gateway: str
    """Beginning of an address."""
    headers: dict[str, str] = field(default_factory=dict)
    certificate: Path | None = None
    """Of the proxy. None: connections are not encrypted."""


@dataclass
class Heard:
    """All that one client has heard."""

    texts: list[str] = field(default_factory=list)
    """Of each sequence, so far."""
    reasons: list[str] = field(default_factory=list)
    """The finish reason of each sequence; empty: none has come."""
    ids: list[int] = field(default_factory=list)
    """Token ids: of a single sequence, over gRPC."""
    error: str = ""
    """Of the server or the connection. An answer over HTTP can also end without one too early:
    :attr:`is_whole` decides."""
    came: list[float] = field(default_factory=list)
    """When each response came; monotonic seconds."""
    ended_at: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether every sequence has a finish reason, as a client may judge."""
        return bool(self.reasons) and all(self.reasons)

    def note(self, texts: Sequence[str], reasons: Sequence[str]) -> None:
        """A response of Triton's has come, with one entry for each sequence."""
        self.came.append(time.monotonic())
        for index, text in enumerate(texts):
            self.texts[index] += text
            self.reasons[index] = "" if reasons[index] == "None" else reasons[index]


async def ask(
    way: str, doors: Doors, request: Request, heard: Heard, longest_s: float = LONGEST_S
) -> None:
    """Send one request in one of WAYS, on a connection of its own, and read to its end. Whatever
    goes wrong is noted."""
    heard.texts = [""] * request.n
    heard.reasons = [""] * request.n
    try:
        async with asyncio.timeout(longest_s):
            await WAYS[way](doors, request, heard)
    except TimeoutError:
        heard.error = f"no end within {longest_s:.0f} s"
    except (aiohttp.ClientError, grpc.RpcError, InferenceServerException, OSError) as error:
        heard.error = repr(error)
    heard.ended_at = time.monotonic()


# ------------------------------------------------------------------------------- gRPC


async def _ask_over_grpc(doors: Doors, request: Request, heard: Heard) -> None:
    certificate = None if doors.certificate is None else str(doors.certificate)
    async with triton.InferenceServerClient(
        doors.grpc, ssl=certificate is not None, root_certificates=certificate
    ) as client:
        await stream_over_grpc(client, request, heard, headers=doors.headers)


async def stream_over_grpc(
    client: triton.InferenceServerClient,
    request: Request,
    heard: Heard,
    *,
    headers: dict[str, str] | None = None,
    leave_after: int | None = None,
) -> None:
    """A stream, read to its end; or left, which cancels it, after so many responses."""
    flags = [*_FLAGS, "stream"]
    if request.n == 1:
        flags.append("return_output_ids")
    inputs = [_tensor(flag, np.array([True]), "BOOL") for flag in flags]
    inputs.append(_tensor("input_ids", np.array(request.prompt, np.int32), "INT32"))
    params = np.array([json.dumps(request.params)], object)
    inputs.append(_tensor("sampling_parameters", params, "BYTES"))

    async def send() -> Any:
        yield {"model_name": MODEL, "inputs": inputs}

    answers = client.stream_infer(send(), headers=headers or None)
    async for result, error in answers:
        if error is not None:
            heard.error = str(error)
            continue
        texts = [text.decode() for text in result.as_numpy("text_output")]
        reasons = [reason.decode() for reason in result.as_numpy("finish_reason")]
        heard.note(texts, reasons)
        if request.n == 1:
            heard.ids += result.as_numpy("output_ids").tolist()
        if leave_after is not None and len(heard.came) >= leave_after:
            answers.cancel()
            return


def _tensor(name: str, array: np.ndarray, kind: str) -> triton.InferInput:
    tensor = triton.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


# ------------------------------------------------------------------------------- HTTP


async def _ask_for_all(doors: Doors, request: Request, heard: Heard) -> None:
    """One response, with everything."""
    url = f"{doors.http}/v2/models/{MODEL}/generate"
    async with _session(doors) as session, session.post(url, json=triton_body(request)) as answer:
        said = await answer.text()
        if answer.status == 200:
            _note_triton(json.loads(said), heard)
        else:
            heard.error = f"{answer.status}: {said}"


async def _ask_for_stream(doors: Doors, request: Request, heard: Heard) -> None:
    url = f"{doors.http}/v2/models/{MODEL}/generate_stream"
    body = {**triton_body(request), "stream": True}
    async for event in _events(doors, url, body, heard):
        _note_triton(event, heard)


async def _ask_gateway(doors: Doors, request: Request, heard: Heard) -> None:
    url = f"{doors.gateway}/v1/completions"
    body = {"model": MODEL, "prompt": request.prompt, "stream": True, **request.params}
    async for event in _events(doors, url, body, heard):
        if "error" in event:
            heard.error = str(event["error"])
            continue
        heard.came.append(time.monotonic())
        for choice in event["choices"]:
            heard.texts[choice["index"]] += choice["text"]
            heard.reasons[choice["index"]] = choice["finish_reason"] or ""


def triton_body(request: Request) -> dict[str, Any]:
    """The JSON of a request to ``/generate`` and ``/generate_stream``."""
    params = json.dumps(request.params)
    flags = dict.fromkeys(_FLAGS, True)
    return {"input_ids": request.prompt, "sampling_parameters": params, **flags}


def _note_triton(event: dict[str, Any], heard: Heard) -> None:
    """One response over HTTP, where a tensor of one element is no list."""
    if "error" in event:
        heard.error = event["error"]
        return
    texts = event["text_output"]
    reasons = event["finish_reason"]
    if isinstance(texts, str):
        texts = [texts]
        reasons = [reasons]
    heard.note(texts, reasons)


async def _events(doors: Doors, url: str, body: dict[str, Any], heard: Heard) -> Any:
    """The server-sent events of an answer, without what ends them."""
    async with _session(doors) as session, session.post(url, json=body) as answer:
        if answer.status != 200:
            heard.error = f"{answer.status}: {await answer.text()}"
            return
        async for line in answer.content:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def _session(doors: Doors) -> aiohttp.ClientSession:
    tls = None
    if doors.certificate is not None:
        tls = ssl.create_default_context(cafile=str(doors.certificate))
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=True if tls is None else tls),
        headers=doors.headers,
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=1 << 20,  # a line is a whole event
    )


GATEWAY = "gateway"
WAYS: dict[str, Callable[[Doors, Request, Heard], Awaitable[None]]] = {
    "gRPC": _ask_over_grpc,
    "generate": _ask_for_all,
    "generate_stream": _ask_for_stream,
    GATEWAY: _ask_gateway,
}

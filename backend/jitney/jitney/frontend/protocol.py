"""Tensors in, tensors out: the contract with clients (docs/contract.md), without threads or state.

:func:`parse_request` turns the server's request into a :class:`ClientRequest` and refuses what is
wrong with it; :class:`ResponseWriter` turns a completion's news into named arrays. Called by the
service and the responder.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from jitney.errors import InvalidArgumentError
from jitney.frontend.channel import NamedArray
from jitney.frontend.contract import INPUTS, PROMPT_INPUTS, RETURN_FLAGS, TASKS
from jitney.messages import Logprob, Timing
from jitney.sampling_params import (
    LIMITS_HEADER,
    Limits,
    SamplingParams,
    decode_sampling_json,
    parse_limits,
    parse_sampling_params,
)
from jitney.text.completion import SequenceDelta
from jitney.text.logprobs import LogprobsEncoder, join
from jitney.tracing import HEADERS

MAX_REQUEST_ID = 64
"""Characters that are kept of a client's request id."""
MAX_CANDIDATES = 8192
"""Most logprobs in one part of a response, or tokens if none are asked for: some 10 ms of work."""

_NUMPY_KINDS = {
    "TYPE_STRING": ("O", "BYTES"),
    "TYPE_BOOL": ("b", "BOOL"),
    "TYPE_INT32": ("i", "INT32"),
}
_RESERVED = frozenset(
    {"id", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end"}
)
"""Request parameters that are the server's own, as those that begin with ``triton_`` are."""
_HEADERS = (*HEADERS, LIMITS_HEADER)
_Arrays = dict[str, np.ndarray]


class StreamWithInputError(InvalidArgumentError):
    """The one error whose whole text is vllm_backend's, because its clients compare it."""

    @property
    def client_message(self) -> str:
        """Without the name of the code."""
        return str(self)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What a client asked for; the prompt not encoded, the parameters' ranges not checked yet."""

    prompt_input: str
    """Which of ``PROMPT_INPUTS`` was given; empty if none is needed."""
    prompt: bytes | np.ndarray
    """UTF-8 text or JSON as it came, or INT32 ids of shape [number of tokens]."""
    params: SamplingParams
    stream: bool
    echo: bool
    """Put the prompt before the output's text."""
    returns: frozenset[str]
    """Names of the optional outputs that were asked for."""
    request_id: str
    """The client's; the log shows it, and nothing else."""
    task: str = "generate"
    """One of ``TASKS``."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """The headers of the trace that it belongs to."""
    limits: Limits = field(default_factory=Limits)
    """Of its client's API key."""

    @property
    def prompt_bytes(self) -> int:
        """Size of the prompt as it came."""
        return len(self.prompt) if isinstance(self.prompt, bytes) else self.prompt.nbytes


def parse_request(request: Any) -> ClientRequest:
    """Read the tensors and parameters of the server's ``InferenceRequest``.

    Raises InvalidArgumentError for a wrong dtype, shape or count, for anything but exactly one
    prompt, for parameters that are not known, and for combinations that cannot be served.
    """
    arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    for name, array in arrays.items():
        _check_array(name, array)
    task = _task_of(arrays)
    prompt_input = _prompt_input_of(arrays, task)
    stream = _flag(arrays, "stream", default=False)
    echo = not _flag(arrays, "exclude_input_in_output", default=stream)
    if stream and echo:
        raise StreamWithInputError(
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not "
            "allowed."
        )
    given, headers = _split_parameters(request.parameters() or "{}")
    limits = parse_limits(headers.pop(LIMITS_HEADER, ""))
    params = _parse_params(arrays, given)
    flags = [flag for flag in RETURN_FLAGS if _flag(arrays, flag, default=False)]
    returns = frozenset(flag.removeprefix("return_") for flag in flags)
    if "output_ids" in returns and params.n > 1:
        raise InvalidArgumentError.of("n", params.n, "1 with return_output_ids")
    return ClientRequest(
        prompt_input=prompt_input,
        prompt=_prompt_of(arrays, prompt_input),
        params=params,
        stream=stream,
        echo=echo,
        returns=returns,
        request_id=request.request_id()[:MAX_REQUEST_ID],
        task=task,
        trace=headers,
        limits=limits,
    )


def _task_of(arrays: _Arrays) -> str:
    if "task" not in arrays:
        return "generate"
    task = _bytes(arrays["task"][0]).decode("utf-8", "replace")
    if task not in TASKS:
        raise InvalidArgumentError.of("task", task, f"one of {', '.join(TASKS)}")
    return task


def _prompt_input_of(arrays: _Arrays, task: str) -> str:
    """The input that holds the prompt; empty if the task needs none."""
    allowed = TASKS[task]
    given = [name for name in PROMPT_INPUTS if name in arrays]
    if not given and not allowed:
        return ""
    if len(given) == 1 and given[0] in allowed:
        return given[0]
    exactly_one = "exactly one of " if allowed else ""
    raise InvalidArgumentError(
        f"the prompt is given by {' and '.join(given) or 'no input'}, but must be given by "
        f"{exactly_one}{', '.join(allowed) or 'no input'}"
    )


def _prompt_of(arrays: _Arrays, prompt_input: str) -> bytes | np.ndarray:
    if not prompt_input:
        return b""
    array = arrays[prompt_input]
    return array if prompt_input == "input_ids" else _bytes(array[0])


def _split_parameters(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Split the request's parameters (JSON) into the client's own and the headers. The server hands
    headers on as parameters: those of a trace, and the limits that a gateway sets. A client of HTTP
    may write a header in capitals; the names returned are in small letters."""
    # The limits bind the client. If the name is there twice, one of them may be the client's own,
    # and JSON keeps only one of two equal names.
    if text.lower().count(f'"{LIMITS_HEADER}"') > 1:
        raise InvalidArgumentError(f"{LIMITS_HEADER} is given twice, but is no request's parameter")
    given = decode_sampling_json(text)
    headers: dict[str, str] = {}
    for name in list(given):
        if name.lower() in _HEADERS:
            headers[name.lower()] = str(given.pop(name))
    return given, headers


def _check_array(name: str, array: np.ndarray) -> None:
    if name not in INPUTS:
        raise InvalidArgumentError(f"input {name!r} is not one of {', '.join(INPUTS)}")
    data_type, dims = INPUTS[name]
    kind, shown = _NUMPY_KINDS[data_type]
    if array.dtype.kind != kind or (kind == "i" and array.dtype.itemsize != 4):
        raise InvalidArgumentError(f"input {name} has type {array.dtype}, but must be {shown}")
    if array.ndim != 1 or (dims >= 0 and array.shape[0] != dims):
        shape = list(array.shape)
        raise InvalidArgumentError(f"input {name} has shape {shape}, but must be {[dims]}")


def _flag(arrays: _Arrays, name: str, default: bool) -> bool:
    return bool(arrays[name][0]) if name in arrays else default


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def _parse_params(arrays: _Arrays, given: dict[str, Any]) -> SamplingParams:
    """The tensor if there is one, else the request's parameters (JSON too)."""
    if "sampling_parameters" in arrays:
        text = _bytes(arrays["sampling_parameters"][0])
        return parse_sampling_params(decode_sampling_json(text))
    own = {name: value for name, value in given.items() if not _is_reserved(name)}
    return parse_sampling_params(own)


def _is_reserved(parameter: str) -> bool:
    return parameter in _RESERVED or parameter.startswith("triton_")


class ResponseWriter:
    """Writes one request's responses as named arrays.

    Shapes, with n sequences: text_output, finish_reason, stop_string, cumulative_logprob, logprobs
    and num_output_tokens [n]; prompt_logprobs, num_input_tokens and timing [1]; output_ids
    [number of new tokens], n = 1 only.
    """

    def __init__(
        self, request: ClientRequest, echo_text: str, prompt_tokens: int, encoder: LogprobsEncoder
    ) -> None:
        """``echo_text`` goes before each sequence's first text. ``encoder`` is for the prompt's
        logprobs; those of the output arrive encoded."""
        params = request.params
        self._returns = request.returns
        self._echo = [echo_text] * params.n  # empty texts after the first response
        self.num_prompt_tokens = prompt_tokens
        self._encode = encoder.encode
        self._no_logprobs = b"null" if params.logprobs is None else b"[]"
        self._prompt_logprobs: list[bytes] = []  # encoded so far, for the first response
        self._prompt_is_sent = False
        self.most = max(1, MAX_CANDIDATES // (1 + (params.logprobs or 0)))
        """Most tokens of one response of a stream, those of all sequences together."""
        self._most_prompt = max(1, MAX_CANDIDATES // (1 + (params.prompt_logprobs or 0)))

    def add_prompt(self, positions: Sequence[list[Logprob] | None]) -> bool:
        """Encode the next part of the prompt's logprobs, for the first response. Returns True once
        nothing is left to encode; until then it is to be called again before :meth:`write`."""
        done = len(self._prompt_logprobs)
        if self._prompt_is_sent or done == len(positions):
            return True
        part = positions[done : done + self._most_prompt]
        self._prompt_logprobs += [self._encode(each) for each in part]
        return False

    def write(self, deltas: Sequence[SequenceDelta], timing: Timing | None) -> list[NamedArray]:
        """The arrays of one response. ``timing`` is None but for the last one."""
        texts = [echo + delta.text for echo, delta in zip(self._echo, deltas, strict=True)]
        self._echo = [""] * len(deltas)
        tensors = [("text_output", strings(texts))]
        for name, make in _MADE_OF_DELTAS.items():
            if name in self._returns:
                tensors.append((name, make(deltas)))
        if "logprobs" in self._returns:
            tensors.append(("logprobs", self._logprobs(deltas)))
        if "num_input_tokens" in self._returns:
            tensors.append(("num_input_tokens", np.array([self.num_prompt_tokens], np.uint32)))
        if timing is not None and "timing" in self._returns:
            tensors.append(("timing", strings([msgspec.json.encode(timing)])))
        if self._prompt_logprobs:
            tensors.append(("prompt_logprobs", strings([join(self._prompt_logprobs)])))
            self._prompt_logprobs = []
            self._prompt_is_sent = True
        return tensors

    def _logprobs(self, deltas: Sequence[SequenceDelta]) -> np.ndarray:
        texts: list[bytes] = []
        for delta in deltas:
            encoded = delta.encoded_logprobs
            texts.append(join(encoded) if encoded else self._no_logprobs)
        return strings(texts)


def _output_ids(deltas: Sequence[SequenceDelta]) -> np.ndarray:
    ids: list[int] = []
    for delta in deltas:
        ids += delta.ids
    return np.array(ids, np.int32)


_MADE_OF_DELTAS: dict[str, Callable[[Sequence[SequenceDelta]], np.ndarray]] = {
    "finish_reason": lambda deltas: strings(str(delta.finish_reason) for delta in deltas),
    "stop_string": lambda deltas: strings(delta.stop_string or "" for delta in deltas),
    "cumulative_logprob": lambda deltas: np.array(
        [delta.cumulative_logprob or 0 for delta in deltas], np.float32
    ),
    "num_output_tokens": lambda deltas: np.array([len(delta.ids) for delta in deltas], np.uint32),
    "output_ids": _output_ids,
}
"""The optional outputs that are made of the sequences' new tokens and texts alone: name -> how."""


def strings(values: Iterable[str | bytes]) -> np.ndarray:
    """A STRING tensor's array: UTF-8 bytes as objects."""
    return np.array([_bytes(value) for value in values], dtype=object)

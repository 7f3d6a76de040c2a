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
"""Most candidates that are encoded in one go, some 10 ms of work. A candidate is a token with its
log-probability: each position has one for the token itself, and one more for each alternative that
``logprobs`` asks for."""

_DTYPES = {
    "TYPE_STRING": np.dtype(object),
    "TYPE_BOOL": np.dtype(bool),
    "TYPE_INT32": np.dtype(np.int32),
}
_SHOWN_TYPES = {"TYPE_STRING": "BYTES", "TYPE_BOOL": "BOOL", "TYPE_INT32": "INT32"}
"""As clients of the server know them."""
_RESERVED = frozenset(
    {"id", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end"}
)
"""Request parameters that are the server's own. So are all that begin with ``triton_``."""
_LIKE_OURS = ("priority", "timeout")
"""Those of them that a client may have meant as sampling parameters."""
_HEADERS = (*HEADERS, LIMITS_HEADER)
"""Request parameters that were headers of a client's or gateway's call, in small letters."""
_Arrays = dict[str, np.ndarray]


class StreamWithInputError(InvalidArgumentError):
    """The one error whose whole text is vllm_backend's, because its clients compare it."""

    @property
    def client_message(self) -> str:
        """Without the name of the code."""
        return str(self)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What a client asked for. The prompt is not encoded yet, and the values of ``params`` have the
    right types but may be out of range."""

    prompt_input: str
    """Which of ``PROMPT_INPUTS`` was given; empty if the task needs none."""
    prompt: bytes | np.ndarray
    """The bytes of a text or of JSON as they came, or INT32 ids of shape [number of tokens]."""
    params: SamplingParams
    stream: bool
    echo: bool
    """Whether the prompt's text goes before the output's."""
    returns: frozenset[str]
    """Names of the optional outputs that were asked for."""
    request_id: str
    """The client's, for logs and spans."""
    task: str = "generate"
    """One of ``TASKS``."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """The headers of the trace that the request belongs to."""
    limits: Limits = field(default_factory=Limits)
    """What the client's API key allows."""
    params_bytes: int = 0
    """Size of ``params`` as they came: JSON, which may have a large grammar."""
    ignored: tuple[str, ...] = ()
    """Those of ``_LIKE_OURS`` that stood among the request's parameters."""

    @property
    def num_bytes(self) -> int:
        """Size of the prompt and of the sampling parameters as they came."""
        if isinstance(self.prompt, bytes):
            return len(self.prompt) + self.params_bytes
        return self.prompt.nbytes + self.params_bytes


def parse_request(request: Any) -> ClientRequest:
    """Read the tensors and parameters of the server's ``InferenceRequest``.

    Raises InvalidArgumentError for a tensor of a wrong name, dtype or shape, for no prompt or more
    than one, for unknown parameters, and for combinations that cannot be served.
    """
    arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    for name, array in arrays.items():
        _check_array(name, array)
    task = _task_of(arrays)
    prompt_input = _prompt_input_of(arrays, task)
    stream = _flag(arrays, "stream", default=False)
    # By default a stream's output is without the prompt, and any other output with it.
    echo = not _flag(arrays, "exclude_input_in_output", default=stream)
    if stream and echo:
        raise StreamWithInputError(
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not "
            "allowed."
        )
    parameters = request.parameters() or "{}"
    given, headers = _split_parameters(parameters)
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
        params_bytes=len(parameters) + _length_of(arrays, "sampling_parameters"),
        ignored=tuple(name for name in _LIKE_OURS if name in given),
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
    found = " and ".join(given) or "no input"
    bound = f"exactly one of {', '.join(allowed)}" if allowed else "no input"
    raise InvalidArgumentError(f"the prompt is given by {found}, but must be given by {bound}")


def _prompt_of(arrays: _Arrays, prompt_input: str) -> bytes | np.ndarray:
    if not prompt_input:
        return b""
    array = arrays[prompt_input]
    if prompt_input == "input_ids":
        return array
    return _bytes(array[0])


def _split_parameters(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Split the request's parameters (JSON) into the client's own and headers. The server hands
    headers of a call on as parameters: those of a trace, and the limits that a gateway sets. Their
    names are returned in small letters, because a client of HTTP may send capitals."""
    # Over HTTP, deploy/proxy writes the limits into the request's JSON, beside the client's own
    # parameters. If the client has sent a parameter of the same name, the decoder would keep one of
    # the two: perhaps the client's, which would then replace the limits that bind it.
    if text.lower().count(f'"{LIMITS_HEADER}"') > 1:
        raise InvalidArgumentError(
            f"{LIMITS_HEADER} is given twice: it is a header, not a request parameter"
        )
    given = decode_sampling_json(text)
    headers: dict[str, str] = {}
    for name in list(given):
        if name.lower() in _HEADERS:
            headers[name.lower()] = str(given.pop(name))
    return given, headers


def _check_array(name: str, array: np.ndarray) -> None:
    if name not in INPUTS:
        raise InvalidArgumentError(f"input {name!r} is not one of {', '.join(INPUTS)}")
    data_type = INPUTS[name].data_type
    if array.dtype != _DTYPES[data_type]:
        shown = _SHOWN_TYPES[data_type]
        raise InvalidArgumentError(f"input {name} has type {array.dtype}, but must be {shown}")
    length = INPUTS[name].length
    fits = array.ndim == 1 and (length == -1 or len(array) == length)
    if not fits:
        shape = list(array.shape)
        raise InvalidArgumentError(f"input {name} has shape {shape}, but must be {[length]}")


def _flag(arrays: _Arrays, name: str, default: bool) -> bool:
    if name not in arrays:
        return default
    return bool(arrays[name][0])


def _length_of(arrays: _Arrays, name: str) -> int:
    """The length of a text; 0 if it was not given."""
    return len(arrays[name][0]) if name in arrays else 0


def _bytes(value: str | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    # Keep invalid text: it is refused later, by an error that names the field.
    return str(value).encode("utf-8", "surrogatepass")


def _parse_params(arrays: _Arrays, given: dict[str, Any]) -> SamplingParams:
    """Read the sampling parameters from their tensor. Without that, they are the request's
    parameters ``given``."""
    if "sampling_parameters" in arrays:
        text = _bytes(arrays["sampling_parameters"][0])
        return parse_sampling_params(decode_sampling_json(text))
    own = {name: value for name, value in given.items() if not _is_reserved(name)}
    return parse_sampling_params(own)


def _is_reserved(parameter: str) -> bool:
    return parameter in _RESERVED or parameter.startswith("triton_")


class PromptLogprobsEncoder:
    """Encodes the logprobs of one prompt, as JSON. It does so in parts, because all of them at once
    would delay other requests."""

    def __init__(
        self,
        positions: Sequence[list[Logprob] | None],
        max_positions: int,
        encoder: LogprobsEncoder,
    ) -> None:
        """``positions``: the candidates at each position of the prompt. A part has
        ``max_positions`` of them."""
        self._positions = positions
        self._max_positions = max_positions
        self._encoder = encoder
        self._encoded: list[bytes] = []  # of the first positions

    @property
    def is_complete(self) -> bool:
        """Whether all parts are encoded."""
        return len(self._encoded) == len(self._positions)

    def encode_next_part(self) -> None:
        """Encode one part more."""
        begin = len(self._encoded)
        for candidates in self._positions[begin : begin + self._max_positions]:
            self._encoded.append(self._encoder.encode(candidates))

    def result(self) -> bytes:
        """The list of all positions, once they are encoded."""
        assert self.is_complete
        return join(self._encoded)


class ResponseWriter:
    """Writes one request's responses as named arrays.

    Shapes, with n sequences: text_output, finish_reason, stop_string, cumulative_logprob, logprobs
    and num_output_tokens [n]; prompt_logprobs, num_input_tokens and timing [1]; output_ids
    [number of new tokens], n = 1 only.
    """

    def __init__(
        self, request: ClientRequest, echo_text: str, num_prompt: int, encoder: LogprobsEncoder
    ) -> None:
        """``echo_text`` goes before each sequence's first text. The prompt has ``num_prompt``
        tokens. ``encoder`` is for the prompt's logprobs; the output's come encoded."""
        params = request.params
        self._returns = request.returns
        self._echo_text = echo_text  # empty once it has been written
        self.num_prompt = num_prompt
        self._encoder = encoder
        # For a sequence without new logprobs: null if none were asked for, else an empty list.
        self._no_logprobs = b"null" if params.logprobs is None else b"[]"
        self.max_tokens_per_response = _max_positions(params.logprobs)
        """Most new tokens in one response of a stream, all sequences together."""
        self._max_prompt_positions = _max_positions(params.prompt_logprobs)

    def begin_prompt_logprobs(
        self, positions: Sequence[list[Logprob] | None]
    ) -> PromptLogprobsEncoder:
        """Begin to encode the prompt's logprobs. Once the returned encoder is complete, give it to
        :meth:`write`."""
        return PromptLogprobsEncoder(positions, self._max_prompt_positions, self._encoder)

    def write(
        self,
        deltas: Sequence[SequenceDelta],
        timing: Timing | None,
        prompt_logprobs: PromptLogprobsEncoder | None,
    ) -> list[NamedArray]:
        """The arrays of one response. ``deltas`` has what is new in each sequence. ``timing`` is
        given for the last response only, ``prompt_logprobs`` for the first one only."""
        texts = [self._echo_text + delta.text for delta in deltas]
        self._echo_text = ""
        tensors = [("text_output", string_array(texts))]
        for name, make in _FROM_DELTAS.items():
            if name in self._returns:
                tensors.append((name, make(deltas)))
        if "logprobs" in self._returns:
            tensors.append(("logprobs", self._logprobs(deltas)))
        if "num_input_tokens" in self._returns:
            tensors.append(("num_input_tokens", np.array([self.num_prompt], np.uint32)))
        if timing is not None and "timing" in self._returns:
            tensors.append(("timing", string_array([msgspec.json.encode(timing)])))
        if prompt_logprobs is not None:
            tensors.append(("prompt_logprobs", string_array([prompt_logprobs.result()])))
        return tensors

    def _logprobs(self, deltas: Sequence[SequenceDelta]) -> np.ndarray:
        texts: list[bytes] = []
        for delta in deltas:
            encoded = delta.encoded_logprobs
            texts.append(join(encoded) if encoded else self._no_logprobs)
        return string_array(texts)


def _max_positions(logprobs: int | None) -> int:
    """How many positions are encoded in one go, if each has ``logprobs`` alternatives."""
    return max(1, MAX_CANDIDATES // (1 + (logprobs or 0)))


def _finish_reasons(deltas: Sequence[SequenceDelta]) -> np.ndarray:
    return string_array(str(delta.finish_reason) for delta in deltas)


def _stop_strings(deltas: Sequence[SequenceDelta]) -> np.ndarray:
    return string_array(delta.stop_string or "" for delta in deltas)


def _cumulative_logprobs(deltas: Sequence[SequenceDelta]) -> np.ndarray:
    # None: the sequence has no token yet. The sum of no logprobs is 0.
    return np.array([delta.cumulative_logprob or 0 for delta in deltas], np.float32)


def _num_output_tokens(deltas: Sequence[SequenceDelta]) -> np.ndarray:
    return np.array([len(delta.ids) for delta in deltas], np.uint32)


def _output_ids(deltas: Sequence[SequenceDelta]) -> np.ndarray:
    ids: list[int] = []
    for delta in deltas:
        ids += delta.ids
    return np.array(ids, np.int32)


_FROM_DELTAS: dict[str, Callable[[Sequence[SequenceDelta]], np.ndarray]] = {
    "finish_reason": _finish_reasons,
    "stop_string": _stop_strings,
    "cumulative_logprob": _cumulative_logprobs,
    "num_output_tokens": _num_output_tokens,
    "output_ids": _output_ids,
}
"""Name of an optional output -> the function that makes its array. It needs nothing but the
deltas."""


def string_array(values: Iterable[str | bytes]) -> np.ndarray:
    """A STRING tensor's array: UTF-8 bytes as objects."""
    return np.array([_bytes(value) for value in values], dtype=object)

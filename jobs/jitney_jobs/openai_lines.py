"""Tasks whose rows are requests of OpenAI's batch service, one a line: ``{"custom_id": …, "method":
"POST", "url": …, "body": {…}}``. So is each result, with ``response`` in place of the request.

Bodies that are run here are read, and answers written, by the gateway's own functions.
"""

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jitney.errors import InvalidArgumentError, JitneyError
from jitney.llm import Completed
from jitney.sampling_params import decode_sampling_json, parse_sampling_params
from jitney.text.description import describe_model
from jitney_gateway.client_fields import name_clients_field
from jitney_gateway.completion_answer import PromptEcho
from jitney_gateway.embedding_answer import embedding_answer, inputs_of
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.generation import CHAT_APIS, GenerationPlan, plan_chat, plan_completions
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.model_steps import Step
from jitney_gateway.pooling_bodies import EmbeddingRequest
from jitney_gateway.refusals import FieldError
from jitney_gateway.server_request import ServerRequest, requests_of_completions
from jitney_gateway.wire import CompletionRequest, WireRecord, decode
from jitney_gateway.without_effect import leave_out
from jitney_server.standins.batch import NUMPY_TYPES
from jitney_server.standins.signature import Signature

from jitney_jobs.failures import RequestError
from jitney_jobs.generate import Encoder, JobPrompt, LanguageModel, fixed_params
from jitney_jobs.job import Job
from jitney_jobs.openai_form import (
    OpenAiRequest,
    check_line,
    failure_line,
    line_error,
    refused,
    request_digest,
    result_line,
)
from jitney_jobs.rows import RowValues
from jitney_jobs.tensors import Arrays, Tensors, takes_token_ids
from jitney_jobs.texts import TokenizedText

_COMPLETIONS = "/v1/completions"
_EMBEDDINGS = "/v1/embeddings"
_GENERATING = ("/v1/chat/completions", _COMPLETIONS, "/v1/responses")
"""What a language model answers."""
_STREAMING = ("stream", "stream_options")
"""Fields that change nothing in a job."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The names that OpenAI's endpoints have for the most tokens of an answer."""


class LineParts(NamedTuple):
    """A line that is ready for the model: several prompts or texts may be in one."""

    parts: list[Any]
    """What the executor takes, each as if it were a row."""
    num_tokens: int = 0
    """Of all texts to embed. 0 if they have none, or are prompts."""


class LineResult(NamedTuple):
    """What the model has made of a line."""

    results: list[Any]
    """One for each part."""
    num_tokens: int


def _own_body(row: RowValues, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The body with the job's parameters where the line has none."""
    own = row["body"]
    # A limit of the line replaces the job's, also by another name.
    if any(name in own for name in _LIMITS):
        defaults = {name: value for name, value in defaults.items() if name not in _LIMITS}
    body = {**defaults, **own}
    for name in _STREAMING:
        body.pop(name, None)
    return body


class OpenAiLinesOnServer:
    """Lines that a server of OpenAI's API answers. Its answers are taken as they are. The job's
    model, if it has one, replaces that of a line."""

    fields = None
    columns = None

    def __init__(self, job: Job) -> None:
        self._fixed = fixed_params(job)
        self._model = job.model

    def prepare(self, row: RowValues) -> OpenAiRequest:
        check_line(row)
        body = _own_body(row, self._fixed)
        if self._model is not None:
            body["model"] = self._model
        return OpenAiRequest(row["url"], msgspec.json.encode(body))

    def finish(self, row: RowValues, result: RowValues) -> RowValues:
        return result_line(row, result)


class OpenAiLines:
    """Lines that a language model of this process answers."""

    fields = None
    columns = None

    def __init__(self, job: Job, model: LanguageModel) -> None:
        self._defaults = {"model": str(job.model), **fixed_params(job)}
        self._encoder = Encoder(model)
        described = describe_model(self._encoder.tokenizer, model.config, model.info)
        encoded = msgspec.json.encode(described)
        self._model = msgspec.json.decode(encoded, type=ModelDescription)

    def prepare(self, row: RowValues) -> LineParts:
        check_line(row)
        url = row["url"]
        if url not in _GENERATING:
            bound = f"{', '.join(_GENERATING)} (task embed has {_EMBEDDINGS})"
            raise line_error("invalid_url", "url", url, bound)
        body = self._body(row)
        try:
            plan = self._plan(row, body)
            return LineParts([self._prompt(request) for request in plan.server_requests])
        except InvalidArgumentError as error:
            raise refused(name_clients_field(error, body)) from None

    def _body(self, row: RowValues) -> WireRecord:
        api = CHAT_APIS.get(row["url"])
        return _decoded(row, self._defaults, CompletionRequest if api is None else api.body)

    def _plan(self, row: RowValues, body: Any) -> GenerationPlan:
        """Raises FieldError."""
        request_id = request_digest(row["custom_id"])
        ignored = IgnoredFields()
        api = CHAT_APIS.get(row["url"])
        if api is not None:
            return plan_chat(api, body, self._model, request_id=request_id, ignored=ignored)
        leave_out(body, self._model, ignored)
        requests = requests_of_completions(body, self._model, request_id)
        echoes = [self._echo(request) for request in requests] if body.echo else []
        return plan_completions(body, requests, echoes, request_id=request_id)

    def _echo(self, request: ServerRequest) -> PromptEcho:
        ids = self._ids(request)
        tokenizer = self._encoder.tokenizer
        text = request.inputs.get("text_input")
        if isinstance(text, bytes):
            whole = text.decode()
        else:
            whole = tokenizer.decode(ids, skip_special_tokens=False)
        return PromptEcho(whole, tokenizer.decode(ids[:1], skip_special_tokens=False))

    def _prompt(self, request: ServerRequest) -> JobPrompt:
        """Raises InvalidArgumentError."""
        params = request.inputs["sampling_parameters"]
        assert isinstance(params, bytes)
        given = decode_sampling_json(params.decode())
        return JobPrompt(self._ids(request), parse_sampling_params(given))

    def _ids(self, request: ServerRequest) -> list[int]:
        for name in ("messages", "text_input", "input_ids"):
            value = request.inputs.get(name)
            if value is not None:
                assert not isinstance(value, bool)
                return self._encoder.input(name, value)
        raise AssertionError("a request has a prompt")

    def finish(self, row: RowValues, result: LineResult) -> RowValues:
        plan = self._plan(row, self._body(row))
        for index, completed in enumerate(result.results):
            for _ in plan.answer.feed(self._step(index, completed)):
                pass  # the whole answer is written below
        return result_line(row, plan.answer.as_json())

    def _step(self, index: int, completed: Completed) -> Step:
        """All that the model has made of a prompt, in one step."""
        sequences = completed.sequences
        positions = self._encoder.positions
        asked = [sequence.logprobs for sequence in sequences if sequence.logprobs is not None]
        logprobs: list[Any] = [positions.of(each) for each in asked]
        prompt_logprobs: list[Any] | None = None
        if completed.prompt_logprobs is not None:
            prompt_logprobs = positions.of(completed.prompt_logprobs)
        return Step(
            prompt=index,
            texts=[sequence.text for sequence in sequences],
            finish_reasons=[sequence.finish_reason for sequence in sequences],
            num_tokens=[len(sequence.ids) for sequence in sequences],
            num_prompt_tokens=len(completed.prompt_ids),
            logprobs=logprobs or None,
            timing={} if completed.timing is None else msgspec.to_builtins(completed.timing),
            stop_strings=[sequence.stop_string for sequence in sequences],
            prompt_logprobs=prompt_logprobs,
            output_ids=sequences[0].ids if len(sequences) == 1 else [],
        )


class OpenAiEmbeddings:
    """Lines for ``/v1/embeddings`` that an exported model answers."""

    fields = None
    columns = None

    def __init__(self, job: Job, signature: Signature, tokenizer: str | None) -> None:
        self._defaults = {"model": str(job.model)}
        self._column = job.column
        self._tensors = Tensors(job, signature, tokenizer)
        self._inputs = signature.inputs
        self._takes_token_ids = takes_token_ids(signature)

    def prepare(self, row: RowValues) -> LineParts:
        check_line(row)
        if row["url"] != _EMBEDDINGS:
            bound = f"{_EMBEDDINGS} (task generate has {', '.join(_GENERATING)})"
            raise line_error("invalid_url", "url", row["url"], bound)
        try:
            given = inputs_of(self._body(row))
            parts = [self._part(each) for each in given]
        except InvalidArgumentError as error:
            raise refused(error) from None
        return LineParts(parts, sum(map(_num_tokens, parts)))

    def _body(self, row: RowValues) -> EmbeddingRequest:
        return _decoded(row, self._defaults, EmbeddingRequest)

    def _part(self, given: str | list[int]) -> TokenizedText:
        """Raises FieldError."""
        if isinstance(given, str):
            if not given:
                raise FieldError("input", "input has an empty text")
            prepared = self._tensors.prepare({self._column: given})
            if isinstance(prepared, TokenizedText):
                return prepared
            return TokenizedText([prepared], [0], is_long=False)  # the model takes it as it is
        if not self._takes_token_ids:
            raise FieldError("input", "input has token ids, but this model takes only texts")
        ids = np.array(given)
        values = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        chunk: Arrays = {
            info.name: values.get(info.name, np.zeros_like(ids)).astype(NUMPY_TYPES[info.data_type])
            for info in self._inputs
        }
        return TokenizedText([chunk], [len(given)], is_long=False)

    def finish(self, row: RowValues, result: LineResult) -> RowValues:
        body = self._body(row)
        vectors = []
        for part in result.results:
            given = part if self._takes_token_ids else part.chunks[0]
            vector = np.array(self._tensors.finish({}, given)["embedding"], np.float32)
            if body.dimensions not in (None, len(vector)):
                bound = f"{len(vector)}, those of this model"
                raise refused(InvalidArgumentError.of("dimensions", body.dimensions, bound))
            vectors.append(vector)
        return result_line(row, embedding_answer(body, vectors, result.num_tokens))


def failure_of_line(row: RowValues | None, error: JitneyError) -> RowValues:
    """The line of a failure. What the model refuses is told by the body's own field. ``row``: None
    if it could not be read."""
    if row is not None and isinstance(error, InvalidArgumentError):
        with contextlib.suppress(RequestError):
            check_line(row)
            api = CHAT_APIS.get(row["url"])
            type_ = CompletionRequest if api is None else api.body
            error = name_clients_field(error, _decoded(row, {"model": ""}, type_))
    return failure_line(row, error)


def _decoded(row: RowValues, defaults: Mapping[str, Any], type_: Any) -> Any:
    """The line's body as a record. Raises RequestError."""
    try:
        return decode(msgspec.json.encode(_own_body(row, defaults)), type_)
    except InvalidArgumentError as error:
        raise refused(error) from None


def _num_tokens(part: TokenizedText) -> int:
    """Those of a text, special ones too. 0 for a model that takes no token ids."""
    return sum(chunk["input_ids"].size for chunk in part.chunks if "input_ids" in chunk)

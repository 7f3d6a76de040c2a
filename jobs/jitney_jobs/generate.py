"""Tasks of language models: from a row to a prompt, and from what is generated to columns.

The prompt is made by a template, or of a text with columns in braces, or it is a column. Or the row
is a line of OpenAI's batch service: a request with parameters of its own.
"""

import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np
import pyarrow as pa
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError
from jitney.llm import Completed
from jitney.messages import ModelInfo
from jitney.sampling_params import SamplingParams, parse_sampling_params
from jitney.text.chat import make_chat
from jitney.text.intake import encode_chat, encode_prompt
from jitney.text.tokenizer import Tokenizer, TokenizerData

from jitney_jobs.asking import Line
from jitney_jobs.dataset import Chunk, Dataset, Row, Storage, column_of
from jitney_jobs.job import Job, make_job
from jitney_jobs.journal import Record
from jitney_jobs.tensors import Arrays

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_CHAT = "/v1/chat/completions"
_COMPLETION = "/v1/completions"
_OF_THE_SERVICE = ("model", "user", "metadata", "store", "service_tier", "stream")
"""Keys of a body that change nothing here."""


class Language(msgspec.Struct, frozen=True):
    """What preparing must know of a language model."""

    tokenizer: TokenizerData
    config: EngineConfig
    info: ModelInfo


class EncodedPrompt(msgspec.Struct, frozen=True):
    """A prompt, ready for the engine."""

    ids: list[int]
    params: SamplingParams


class Encoder:
    """Texts and chats to token ids, with the checks of every other way in."""

    def __init__(self, language: Language) -> None:
        self._tokenizer = Tokenizer(language.tokenizer)
        self._config = language.config
        self._info = language.info
        self.context = language.info.max_model_len

    def text(self, prompt: Any) -> list[int]:
        """Raises InvalidArgumentError."""
        return encode_prompt(_text(prompt), self._tokenizer, self._config, self._info)

    def chat(self, messages: Any) -> list[int]:
        """A text is a user's message. Raises InvalidArgumentError."""
        chat = make_chat(_messages(messages), {}, self._config)
        return encode_chat(chat, self._tokenizer, self._config, self._info)


def _text(prompt: Any) -> str:
    if not isinstance(prompt, str):
        raise InvalidArgumentError.of("the prompt", prompt, "a text")
    return prompt


def _messages(prompt: Any) -> Any:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


class Generate:
    """A completion or a chat's answer for each row."""

    fields = pa.schema(
        {"output": pa.string(), "finish_reason": pa.string()}
        | {"prompt_tokens": pa.int64(), "output_tokens": pa.int64()}
    )

    def __init__(self, job: Job, encoder: Encoder) -> None:
        self._encode = encoder.chat if job.chat else encoder.text
        self._prompt = _make_prompt(job)
        self._params = _make_params(job)

    def prepare(self, row: Row) -> EncodedPrompt:
        return EncodedPrompt(self._encode(self._prompt(row)), self._params(row))

    def finish(self, row: Row, result: Completed) -> Row:
        lengths = len(result.prompt_ids), len(result.ids)
        return _columns(result.text, result.finish_reason, *lengths)


def prompt_lengths(source: str, column: str, model: str) -> list[int]:
    """Tokens of each text in a column of files, as a job reads them, with the tokenizer of a
    checkpoint. Raises InvalidArgumentError, and CheckpointError for the tokenizer."""
    from jitney.engine.assemble import resolve_model  # imports torch

    job = make_job({"input": source, "output": f"{source}.out", "model": model, "column": column})
    tokenizer = Tokenizer.load(resolve_model(model))
    storage = Storage(job)
    lengths = []
    for chunk in Dataset(job).chunks(Record(Path()), 1024):
        if isinstance(chunk, Chunk):
            rows = (chunk.row(item, storage) for item in chunk.items())
            lengths += [len(tokenizer.encode(_text(column_of(row, column)))) for row in rows]
    return lengths


class GenerateOnServer:
    """The same by a server's model, which has the tokenizer."""

    fields = Generate.fields

    def __init__(self, job: Job) -> None:
        self._chat = job.chat
        self._prompt = _make_prompt(job)
        self._params = _make_params(job)

    def prepare(self, row: Row) -> Arrays:
        prompt: Any = self._prompt(row)
        prompt = msgspec.json.encode(_messages(prompt)) if self._chat else _text(prompt).encode()
        asked = ("finish_reason", "num_input_tokens", "num_output_tokens")
        texts = {"sampling_parameters": msgspec.json.encode(self._params(row))}
        texts["messages" if self._chat else "text_input"] = prompt
        return {
            **{name: np.array([text], np.object_) for name, text in texts.items()},
            "exclude_input_in_output": np.array([True]),
            **{f"return_{name}": np.array([True]) for name in asked},
        }

    def finish(self, row: Row, result: Arrays) -> Row:
        texts = (result[name][0].decode() for name in ("text_output", "finish_reason"))
        lengths = (int(result[f"num_{name}_tokens"][0]) for name in ("input", "output"))
        return _columns(*texts, *lengths)


def _columns(*values: object) -> Row:
    return dict(zip(Generate.fields.names, values, strict=True))


class OpenAiLines:
    """Each row is a line ``{"custom_id": …, "method": "POST", "url": …, "body": {…}}``; so is each
    result, with ``response`` in place of the request."""

    fields = None

    def __init__(self, job: Job, encoder: Encoder) -> None:
        self._fixed = _fixed_params(job)
        self._encoder = encoder

    def prepare(self, row: Row) -> EncodedPrompt:
        _check_line(row)
        if row["url"] not in (_CHAT, _COMPLETION):
            raise InvalidArgumentError.of("url", row["url"], f"{_CHAT} or {_COMPLETION}")
        given = {k: v for k, v in row["body"].items() if k not in _OF_THE_SERVICE}
        if "max_completion_tokens" in given:
            given["max_tokens"] = given.pop("max_completion_tokens")
        if row["url"] == _COMPLETION:
            ids = self._encoder.text(given.pop("prompt", None))
            return EncodedPrompt(ids, parse_sampling_params({**self._fixed, **given}))
        ids = self._encoder.chat(given.pop("messages", None))
        rest = max(1, self._encoder.context - len(ids))  # as the service does: all of the context
        return EncodedPrompt(
            ids, parse_sampling_params({"max_tokens": rest, **self._fixed, **given})
        )

    def finish(self, row: Row, result: Completed) -> Row:
        chat = row["url"] == _CHAT
        tokens = len(result.prompt_ids), sum(len(each.ids) for each in result.sequences)
        choices: list[Row] = []
        for each in result.sequences:
            said = {"message": {"role": "assistant", "content": each.text}}
            choice = said if chat else {"text": each.text}
            choices.append({"index": each.index, **choice, "finish_reason": each.finish_reason})
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{_digest(row)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": row["body"].get("model"),
            "choices": choices,
            "usage": {
                "prompt_tokens": tokens[0],
                "completion_tokens": tokens[1],
                "total_tokens": sum(tokens),
            },
        }
        return _result_line(row, body)


class OpenAiLinesOnServer:
    """The same by a server of OpenAI's API: bodies go there, and come from there, as they are. The
    job's model stands for that of a line, and its parameters for those that a line lacks."""

    fields = None

    def __init__(self, job: Job) -> None:
        self._fixed = _fixed_params(job)
        self._of_job = {"model": job.model}

    def prepare(self, row: Row) -> Line:
        _check_line(row)
        body = {**self._fixed, **row["body"], **self._of_job}
        body.pop("stream", None)
        return row["url"], msgspec.json.encode(body)

    def finish(self, row: Row, result: Row) -> Row:
        return _result_line(row, result)


def _check_line(row: Row) -> None:
    kinds = {"custom_id": (str, "a string"), "url": (str, "a string"), "body": (dict, "an object")}
    for name, (kind, bound) in kinds.items():
        if not isinstance(row.get(name), kind):
            raise InvalidArgumentError.of(name, row.get(name), bound)
    if row.get("method") != "POST":
        raise InvalidArgumentError.of("method", row.get("method"), "POST")


def _digest(row: Row) -> str:
    return hashlib.sha256(row["custom_id"].encode()).hexdigest()[:24]


def _result_line(row: Row, body: Row) -> Row:
    response = {"status_code": 200, "request_id": _digest(row), "body": body}
    id_ = f"batch_req_{_digest(row)}"
    return {"id": id_, "custom_id": row["custom_id"], "response": response, "error": None}


def _fixed_params(job: Job) -> dict[str, Any]:
    """The parameters of all rows."""
    return job.sampling | ({} if job.max_tokens is None else {"max_tokens": job.max_tokens})


def _make_params(job: Job) -> Callable[[Row], SamplingParams]:
    """A row's parameters: those of the job, and those of the row's columns."""
    fixed = _fixed_params(job)
    params = parse_sampling_params(fixed)
    if params.n != 1:
        raise InvalidArgumentError.of("sampling.n", params.n, "1: a row has one answer")
    if not job.sampling_column:
        return lambda row: params
    return lambda row: parse_sampling_params(
        {**fixed, **{name: column_of(row, name) for name in job.sampling_column}}
    )


def _make_prompt(job: Job) -> Callable[[Row], Any]:
    if job.template is not None:
        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            return environment.from_string(job.template).render
        except jinja2.TemplateError as error:
            raise InvalidArgumentError(f"template cannot be used: {error}") from None
    if job.prompt is None:
        return lambda row: column_of(row, job.column)
    text = job.prompt

    def fill(row: Row) -> str:
        def value(match: re.Match[str]) -> str:
            # Two braces without a column stand for one.
            return match[0][0] if match[1] is None else str(column_of(row, match[1]))

        return _FIELD.sub(value, text)

    return fill

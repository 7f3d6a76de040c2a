"""Tasks of language models: from a row to a prompt, and from what is generated to columns.

A row becomes a prompt in one of three ways: by a template; by a text with names of columns in
braces; or by taking one column as it is. ``openai_lines.py`` has rows that are requests.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
import msgspec
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError
from jitney.llm import Completed
from jitney.messages import ModelInfo
from jitney.sampling_params import SamplingParams, parse_sampling_params
from jitney.text.chat import make_chat
from jitney.text.intake import encode_chat, encode_client_bytes, encode_prompt
from jitney.text.tokenizer import Tokenizer, TokenizerData

from jitney_jobs.arrow import pa
from jitney_jobs.column_names import FIELD
from jitney_jobs.dataset import Dataset
from jitney_jobs.job import Job
from jitney_jobs.job_making import make_job
from jitney_jobs.journal import Record
from jitney_jobs.logprobs import COLUMNS, Positions, column_value, logprob_columns
from jitney_jobs.rows import Chunk, RowValues, column_of, columns_named, reason
from jitney_jobs.storage import Storage
from jitney_jobs.tensors import Arrays


class LanguageModel(msgspec.Struct, frozen=True):
    """What must be known of a language model to prepare its prompts."""

    tokenizer: TokenizerData
    config: EngineConfig
    info: ModelInfo


class JobPrompt(msgspec.Struct, frozen=True):
    """A prompt, ready for the engine."""

    ids: list[int]
    params: SamplingParams


class Encoder:
    """Texts and chats to token ids. They are checked as those of a request to the server are."""

    def __init__(self, model: LanguageModel) -> None:
        self.tokenizer = Tokenizer(model.tokenizer)
        self.positions = Positions(self.tokenizer)
        self._config = model.config
        self._info = model.info

    def text(self, prompt: Any) -> list[int]:
        """Raises InvalidArgumentError."""
        return encode_prompt(_text(prompt), self.tokenizer, self._config, self._info)

    def input(self, name: str, value: bytes | list[int]) -> list[int]:
        """An input of docs/contract.md: ``text_input``, ``messages`` or ``input_ids``. Raises
        InvalidArgumentError."""
        if isinstance(value, list):
            return value
        return encode_client_bytes(name, value, self.tokenizer, self._config, self._info).ids

    def chat(self, messages: Any) -> list[int]:
        """A text stands for one message of the user. Raises InvalidArgumentError."""
        chat = make_chat(_messages(messages), {}, self._config)
        return encode_chat(chat, self.tokenizer, self._config, self._info)


def _text(prompt: Any) -> str:
    if not isinstance(prompt, str):
        raise InvalidArgumentError.of("the prompt", prompt, "a text")
    return prompt


def _messages(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


def _fields_of(job: Job) -> pa.Schema:
    return pa.schema(
        {
            "output": pa.string(),
            "finish_reason": pa.string(),
            "prompt_tokens": pa.int64(),
            "output_tokens": pa.int64(),
            **logprob_columns(job),
        }
    )


class Generate:
    """A completion or a chat's answer for each row."""

    def __init__(self, job: Job, encoder: Encoder) -> None:
        self.fields = _fields_of(job)
        self._positions = encoder.positions
        self._encode = encoder.chat if job.chat else encoder.text
        self.columns = columns_of_prompt(job)
        self._prompt_of = _make_prompt(job)
        self._params_of = _make_params(job)

    def prepare(self, row: RowValues) -> JobPrompt:
        return JobPrompt(self._encode(self._prompt_of(row)), self._params_of(row))

    def finish(self, row: RowValues, result: Completed) -> RowValues:
        columns: RowValues = {
            "output": result.text,
            "finish_reason": result.finish_reason,
            "prompt_tokens": len(result.prompt_ids),
            "output_tokens": len(result.ids),
        }
        logprobs = {
            "logprobs": result.sequences[0].logprobs,
            "prompt_logprobs": result.prompt_logprobs,
        }
        for name, tokens in logprobs.items():
            if name in self.fields.names:
                positions = None if tokens is None else self._positions.of(tokens)
                columns[name] = column_value(positions)
        return columns


def prompt_lengths(source: str, column: str, model: str) -> list[int]:
    """Tokens of each text in a column of files, as a job reads them, with the tokenizer of a
    checkpoint. Raises InvalidArgumentError, and CheckpointError for the tokenizer."""
    from jitney.engine.assemble import resolve_model  # imports torch

    # Nothing is written, but a job must have an output outside of its input.
    settings = {"input": source, "output": os.devnull, "model": model, "column": column}
    job = make_job({**settings, "skip_bad_files": False})
    tokenizer = Tokenizer.load(resolve_model(model))
    storage = Storage(job)
    lengths = []
    dataset = Dataset(job)
    dataset.set_schema(None, columns_of_prompt(job))
    for chunk in dataset.chunks(Record.empty(), 1024):
        if isinstance(chunk, Chunk):
            for row in chunk.rows(storage):
                if isinstance(row, Exception):
                    raise InvalidArgumentError(f"input {source}: {reason(row)}")
                text = _text(column_of(row, column))
                lengths.append(len(tokenizer.encode(text)))
    return lengths


class GenerateOnServer:
    """As :class:`Generate`, with a model on a server. The server has the tokenizer."""

    def __init__(self, job: Job) -> None:
        self.fields = _fields_of(job)
        self._is_chat = job.chat
        self.columns = columns_of_prompt(job)
        self._prompt_of = _make_prompt(job)
        self._params_of = _make_params(job)

    def prepare(self, row: RowValues) -> Arrays:
        prompt = self._prompt_of(row)
        inputs = {
            "sampling_parameters": _text_array(msgspec.json.encode(self._params_of(row))),
            "exclude_input_in_output": np.array([True]),
            "return_finish_reason": np.array([True]),
            "return_num_input_tokens": np.array([True]),
            "return_num_output_tokens": np.array([True]),
        }
        if "logprobs" in self.fields.names:
            inputs["return_logprobs"] = np.array([True])
        if self._is_chat:
            inputs["messages"] = _text_array(msgspec.json.encode(_messages(prompt)))
        else:
            inputs["text_input"] = _text_array(_text(prompt).encode())
        return inputs

    def finish(self, row: RowValues, result: Arrays) -> RowValues:
        columns: RowValues = {
            "output": result["text_output"][0].decode(),
            "finish_reason": result["finish_reason"][0].decode(),
            "prompt_tokens": int(result["num_input_tokens"][0]),
            "output_tokens": int(result["num_output_tokens"][0]),
        }
        for name in COLUMNS:
            if name in self.fields.names:
                columns[name] = None
                if name in result:
                    columns[name] = column_value(msgspec.json.decode(result[name][0]))
        return columns


def _text_array(text: bytes) -> np.ndarray:
    return np.array([text], np.object_)


def check_settings(job: Job) -> None:
    """The prompt and the parameters that all rows have. Raises InvalidArgumentError."""
    if job.task == "generate" and job.input_format != "openai":
        _make_prompt(job)
        _make_params(job)


def fixed_params(job: Job) -> dict[str, Any]:
    """The parameters of all rows."""
    if job.max_tokens is None:
        return job.sampling
    return {**job.sampling, "max_tokens": job.max_tokens}


def _make_params(job: Job) -> Callable[[RowValues], SamplingParams]:
    """A function from a row to its parameters: those of the job, and those of its columns."""
    fixed = fixed_params(job)
    params = parse_sampling_params(fixed)
    if params.n != 1:
        raise InvalidArgumentError.of("sampling.n", params.n, "1: a row has one answer")
    if not job.sampling_column:
        return lambda row: params

    def params_of(row: RowValues) -> SamplingParams:
        own = {name: column_of(row, name) for name in job.sampling_column}
        return parse_sampling_params({**fixed, **own})

    return params_of


def columns_of_prompt(job: Job) -> list[str]:
    """The columns of the input that prompts and parameters are made of. Raises InvalidArgumentError
    for a template that cannot be used."""
    names = list(job.sampling_column)
    if job.template is not None:
        names += jinja2.meta.find_undeclared_variables(_parsed(job.template))
    elif job.prompt is not None:
        names += [match[1] for match in FIELD.finditer(job.prompt) if match[1] is not None]
    else:
        names.append(job.column)
    return columns_named(names)


def _parsed(template: str) -> jinja2.nodes.Template:
    try:
        return jinja2.Environment().parse(template)
    except jinja2.TemplateError as error:
        raise InvalidArgumentError(f"template cannot be used: {error}") from None


def _make_prompt(job: Job) -> Callable[[RowValues], Any]:
    """A function from a row to its prompt."""
    if job.template is not None:
        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            return environment.from_string(job.template).render
        except jinja2.TemplateError as error:
            raise InvalidArgumentError(f"template cannot be used: {error}") from None
    if job.prompt is None:
        return lambda row: column_of(row, job.column)
    _check_braces(job.prompt)
    return partial(_filled, job.prompt)


def _check_braces(prompt: str) -> None:
    """Raises InvalidArgumentError for ``{text``: all rows would have one and the same prompt."""
    names_a_column = any(match[1] is not None for match in FIELD.finditer(prompt))
    rest = FIELD.sub("", prompt)
    if not names_a_column and ("{" in rest or "}" in rest):
        bound = "with the name of a column between two braces, {text}; {{ is a brace"
        raise InvalidArgumentError.of("prompt", prompt, bound)


def _filled(text: str, row: RowValues) -> str:
    """``text`` with the values of columns in place of their names in braces."""

    def value(match: re.Match[str]) -> str:
        column = match[1]
        if column is None:
            return match[0][0]  # ``{{`` or ``}}`` is one brace
        return str(column_of(row, column))

    return FIELD.sub(value, text)

"""A job's settings: the options of ``jitney batch run``, which are also the keys of a job file.

Each field's bound and help stand with it; the command line is made from them (``command.py``).
``job_making`` reads settings, checks them, and makes a job of them.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jitney_jobs.addresses import without_keys
from jitney_jobs.encodings import DecodeErrors
from jitney_jobs.outcome import RetryPolicy
from jitney_jobs.shards import Shard
from jitney_jobs.times import seconds_of

Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Numbers = tuple[float, ...]
TaskName = Literal["generate", "embed", "classify", "score", "map"]
InputFormat = Literal["auto", "parquet", "jsonl", "csv", "arrow", "text", "image", "openai"]
OutputFormat = Literal["auto", "parquet", "jsonl", "csv"]
NonFiniteRule = Literal["null", "text", "error"]
LIST = "@"
"""How an input begins that is a list of inputs: ``@list.txt``."""
Truncate = Literal["end", "error", "chunk-mean"]
CHANGEABLE = frozenset(
    (
        "output",
        "journal",
        "part_rows",
        "part_seconds",
        "in_flight",
        "workers",
        "retries",
        "patience",
        "row_timeout",
        "watchdog",
        "max_errors",
        "skip_bad_files",
        "limit",
        "run",
        "batch_size",
        "server",
        "at_once",
        "tls",
        "ca_file",
        "api_key_file",
        "ray",
        "shard",
        "finish_by",
        "within",
        "name",
        "metrics_port",
        "metrics_host",
        "push_gateway",
        "accept_changes",
    )
)
"""Fields that may change between two runs of a job: they do not change what is in its output."""
CHANGEABLE_IN_ENGINE = frozenset(
    (
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_bytes",
        "kv_cache_fraction",
        "grammar_cache",
        "threads",
        "eviction",
        "watermark",
    )
)
"""The same of the engine's options, which are the field ``engine``: those of memory and speed."""
_ADDRESSES = ("input", "output", "server", "ray", "push_gateway")


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job. Made and checked by :func:`~jitney_jobs.job_making.make_job`."""

    input: str
    output: str
    more_inputs: Annotated[
        list[str], "Another file, folder, glob or @list of the input; several times."
    ] = []
    model: Annotated[
        str | None, "Checkpoint (folder, or id in the local hub), or exported model."
    ] = None
    server: Annotated[
        str | None, "HOST:PORT of a Triton with that model; http:// for OpenAI lines."
    ] = None
    tls: Annotated[bool, "The server, or a proxy before it, speaks TLS."] = False
    ca_file: Annotated[
        str | None, "PEM file that its certificate is checked with; implies TLS."
    ] = None
    api_key_file: Annotated[
        str | None,
        "File whose first line is the API key for the server or its proxy: KEY or NAME:KEY.",
    ] = None
    at_once: Annotated[Count, "Requests under way to the server."] = 32
    ray: Annotated[str | None, "Address of a Ray cluster (auto: of this node), or local."] = None
    shard: Annotated[
        str | None, "Do shard I of N, I/N, counted from 0; `jitney batch merge` joins all of them."
    ] = None
    task: Annotated[TaskName, "What is done with each row."] = "generate"
    input_format: Annotated[InputFormat, "auto goes by the files' names."] = "auto"
    encoding: Annotated[
        str | None, "Of texts, lines and CSV. Default: UTF-8, or what a byte order mark says."
    ] = None
    decode_errors: Annotated[
        DecodeErrors,
        "Bytes that are no text: error makes bad rows, replace puts U+FFFD and counts.",
    ] = "error"
    delimiter: Annotated[
        str | None, "Of CSV: a character, or tab. Default: as the first records show."
    ] = None
    output_format: Annotated[OutputFormat, "auto: jsonl for input in lines, else parquet."] = "auto"
    output_column: Annotated[
        str | None, "Name of the result's column; its other columns begin with NAME_."
    ] = None
    keep: Annotated[list[str] | None, "Write only this column of the input; several times."] = None
    partition_by: Annotated[
        list[str], "Divide Parquet into folders by this column; several times."
    ] = []
    non_finite: Annotated[NonFiniteRule, "What NaN and infinities become in JSON lines."] = "null"
    schema: Annotated[
        str | None, 'Types of columns: JSON, {"id": "int64"}, or its file. Default: look ahead.'
    ] = None
    prompt: Annotated[str | None, "With columns in braces: 'Summarize: {text}'."] = None
    template: Annotated[str | None, "A jinja template of the prompt, or its file."] = None
    column: Annotated[str, "Column of the prompt, without --prompt and --template."] = "text"
    chat: Annotated[bool, "The prompt is a user's message, or a list of messages."] = False
    max_tokens: Annotated[int | None, "Most tokens of an answer."] = None
    sampling: Annotated[dict[str, Any], 'Parameters as JSON: {"temperature": 0.7}.'] = {}
    sampling_column: Annotated[list[str], "Column of that parameter's values; several times."] = []
    engine: Annotated[dict[str, Any], 'Engine options: {"max_num_seqs": 64}.'] = {}
    tokenizer: Annotated[str | None, "tokenizer.json of an exported model. Default: beside it."] = (
        None
    )
    truncate: Annotated[
        Truncate, "Of texts longer than an encoder takes: end cuts them, error makes bad rows."
    ] = "end"
    result: Annotated[str | None, "Name of the model's output to take, if it has several."] = None
    labels: Annotated[str | None, "File of the classes' names, one a line."] = None
    mean: Annotated[Numbers, "Taken off an image's channels, 0 to 1; an option for each."] = (0.0,)
    std: Annotated[Numbers, "What the channels are divided by then; an option for each."] = (1.0,)
    batch_size: Annotated[Count | None, "Rows in a batch of an exported model."] = None
    map: Annotated[str | None, "MODULE:FUNCTION from a row to new columns."] = None
    map_column: Annotated[list[str], "Give map only this column; several times."] = []
    journal: Annotated[
        str | None, "Local folder of the journal. Default: _job in the output, local or s3://."
    ] = None
    accept_changes: Annotated[
        bool, "Go on although the model's files or map's code have changed since the job began."
    ] = False
    ordered: Annotated[bool, "Keep the rows' order."] = False
    part_rows: Annotated[Count, "Most rows of an output file."] = 10_000
    part_seconds: Annotated[Seconds, "Commit after so long, even if a part is small."] = 60.0
    in_flight: Annotated[Count, "Most rows between reading and writing."] = 8192
    workers: Annotated[NonNegative | None, "Worker processes. Default: half the cores."] = None
    patience: Annotated[str, "How long an error that may pass is tried again: 30s, 10m, 4h."] = (
        "10m"
    )
    retries: Annotated[NonNegative, "How often a fault that may be the row's is tried again."] = 3
    row_timeout: Annotated[
        Seconds | None, "Seconds after which a row that does not end is bad."
    ] = None
    watchdog: Annotated[str, "End the job if nothing moves for so long: 30m, 4h."] = "1h"
    max_errors: Annotated[str | int | float, "Bad rows that end the job: a number or share."] = (
        "10%"
    )
    skip_bad_files: Annotated[bool, "Go on without files that cannot be read, and list them."] = (
        True
    )
    limit: Annotated[Count | None, "Do the first rows only. Without it the job goes on."] = None

    run: Annotated[str | None, "What {run} means in input, output and journal."] = None
    finish_by: Annotated[
        str | int | None, "Clock time, 06:00 or 06:00 Europe/Zurich, after which the job is late."
    ] = None
    within: Annotated[str | None, "Time, 4h or 1h30m, after which the job is late."] = None
    metrics_port: Annotated[Port | None, "Serve metrics there while it runs; 0: any port."] = None
    metrics_host: Annotated[str, "Address for that; 0.0.0.0 for all networks."] = "127.0.0.1"
    push_gateway: Annotated[
        str | None, "URL of a Prometheus push gateway that gets the metrics."
    ] = None
    name: Annotated[str | None, "The job's name in its metrics. Default: the output folder's."] = (
        None
    )

    @property
    def fields_that_shape_output(self) -> dict[str, Any]:
        """Once a row is committed, none of them may change."""
        fields = msgspec.to_builtins(self)
        return {name: value for name, value in fields.items() if name not in CHANGEABLE}

    @property
    def its_shard(self) -> Shard | None:
        """The setting ``shard``, once it was checked."""
        return None if self.shard is None else Shard.of(self.shard)

    @property
    def patience_s(self) -> float:
        return seconds_of("patience", self.patience)

    def make_retry_policy(self) -> RetryPolicy:
        """For the passing errors of one run."""
        return RetryPolicy(self.patience_s, self.retries)

    @property
    def watchdog_s(self) -> float:
        return seconds_of("watchdog", self.watchdog)


def absolute_paths(job: Job) -> dict[str, Any]:
    """The paths of local files as absolute ones, so that a job can be resumed from elsewhere."""
    names = ["input", "output", "tokenizer", "journal", "ca_file", "api_key_file"]
    if job.model is not None and job.server is None and Path(job.model).exists():
        names.append("model")  # else it is a name: of a checkpoint in the hub, or on the server
    changes: dict[str, Any] = {}
    for name in names:
        path = getattr(job, name)
        if path:
            changes[name] = _absolute(path)
    changes["more_inputs"] = [_absolute(path) for path in job.more_inputs]
    return changes


def _absolute(path: str) -> str:
    if "://" in path:
        return path
    if path.startswith(LIST):
        return LIST + _absolute(path.removeprefix(LIST))
    return os.path.abspath(path)


def job_without_keys(job: Job) -> Job:
    """As it is stored and shown: no address has its keys."""
    changes: dict[str, Any] = {}
    for name in _ADDRESSES:
        address = getattr(job, name)
        if address is not None:
            changes[name] = _without_keys(address)
    changes["more_inputs"] = [_without_keys(address) for address in job.more_inputs]
    return msgspec.structs.replace(job, **changes)


def _without_keys(address: str) -> str:
    """Of an address, a path, or a list of them: ``@s3://…``."""
    if address.startswith(LIST):
        return LIST + without_keys(address.removeprefix(LIST))
    return without_keys(address)

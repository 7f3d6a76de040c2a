"""A job's settings: the options of ``jitney batch run``, which are also the keys of a job file.

Each field's bound and help stand with it; the command line is made from them (``command.py``).
"""

import os
import re
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from jitney.errors import InstallationError, InvalidArgumentError, install_extra, nearest, show
from jitney.field_types import field_at_fault
from msgspec import Meta

from jitney_jobs.addresses import errors_without_keys, without_keys
from jitney_jobs.delimiters import check_delimiter
from jitney_jobs.encodings import DecodeErrors, Encoding
from jitney_jobs.outcome import RetryPolicy, error_limit
from jitney_jobs.shards import Shard
from jitney_jobs.times import date_text, due_at, seconds_of, with_zone

_CLOCK_TIME = "a clock time of this machine, such as 06:00"
_RUN_NAME = re.compile(r"[\w.+:-]+")
_PATHS_WITH_PLACEHOLDERS = ("input", "more_inputs", "output", "journal")
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
    """One job. Checked by :func:`make_job`."""

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


@errors_without_keys()
def make_job(settings: dict[str, Any]) -> Job:
    """Check settings. Raises InvalidArgumentError that names the field, the value and the bound."""
    settings = _with_one_input(settings)
    _check_names(settings)
    job = _converted(_decoded(_with_filled_paths(settings)))
    job = msgspec.structs.replace(job, **absolute_paths(job), **_contents_of_files(job))
    if job.input_format == "openai":
        job = msgspec.structs.replace(job, keep=[])  # the result is a whole line
    error_limit(job.max_errors)
    if isinstance(job.finish_by, int):
        raise InvalidArgumentError.of("finish_by", job.finish_by, _CLOCK_TIME)
    due_at(job.finish_by, job.within, 0.0)
    if job.finish_by is not None:
        job = msgspec.structs.replace(job, finish_by=with_zone(job.finish_by))
    seconds_of("patience", job.patience)
    seconds_of("watchdog", job.watchdog, least_s=1.0)
    _check_together(job)
    return job


def _with_filled_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """With the date of today for ``{date}`` in paths, and the setting ``run`` for ``{run}``. Raises
    InvalidArgumentError."""
    run = settings.get("run")
    if run is not None and _RUN_NAME.fullmatch(str(run)) is None:
        raise InvalidArgumentError.of("run", run, "a name of letters, digits and any of .+:_-")
    filled = dict(settings)
    for name in _PATHS_WITH_PLACEHOLDERS:
        given = settings.get(name)
        if isinstance(given, str):
            filled[name] = _filled(name, given, run)
        elif isinstance(given, list):
            filled[name] = [_filled(name, path, run) for path in given]
    return filled


def _filled(name: str, path: Any, run: Any) -> Any:
    if not isinstance(path, str):
        return path
    if "{run}" in path and run is None:
        raise InvalidArgumentError(f"{name} has {{run}}: name this run with the setting run")
    return path.replace("{run}", str(run)).replace("{date}", date_text(time.time()))


def _with_one_input(settings: dict[str, Any]) -> dict[str, Any]:
    """``input`` may be a list: its first one is ``input`` here, and the others are
    ``more_inputs``."""
    given = settings.get("input")
    if not isinstance(given, list) or not given:
        return settings
    first, *others = given
    return {**settings, "input": first, "more_inputs": [*others, *settings.get("more_inputs", [])]}


def _check_names(settings: dict[str, Any]) -> None:
    names = [field.encode_name for field in msgspec.structs.fields(Job)]
    for name in settings:
        if name not in names:
            raise InvalidArgumentError(f"setting {name!r} is unknown{nearest(str(name), names)}")
    for name in ("input", "output"):
        if not settings.get(name):
            raise InvalidArgumentError(f"setting {name} is missing")


def _decoded(settings: dict[str, Any]) -> dict[str, Any]:
    """With objects for the settings that the command line gives as JSON."""
    decoded = dict(settings)
    for name in ("sampling", "engine"):
        value = settings.get(name)
        if isinstance(value, str):
            try:
                decoded[name] = msgspec.json.decode(value)
            except msgspec.DecodeError as error:
                raise InvalidArgumentError(f"{name} is not JSON: {error}") from None
    return decoded


def _converted(settings: dict[str, Any]) -> Job:
    """With the types of the fields; each value is checked alone."""
    try:
        return msgspec.convert(settings, Job, strict=False)
    except msgspec.ValidationError as error:
        name = field_at_fault(error)
        bound = str(error).partition(" - at")[0].replace("Expected", "expected")
        raise InvalidArgumentError(f"{name} is {show(settings[name])}: {bound}") from None


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


def _contents_of_files(job: Job) -> dict[str, str]:
    """Of the settings that name a file whose text belongs to the job."""
    changes: dict[str, str] = {}
    for name in ("template", "labels", "schema"):
        text = getattr(job, name)
        if text is None:
            continue
        if name == "schema" and text.lstrip().startswith("{"):
            continue  # the setting is the schema itself
        if os.path.isfile(text):
            try:
                changes[name] = Path(text).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                expected = "a UTF-8 file that can be read"
                raise InvalidArgumentError.of(name, text, expected) from None
        elif name == "template" and "{" in text:
            continue  # the setting is the template itself, and no file's name
        else:
            raise InvalidArgumentError.of(name, text, "a file that is there")
    return changes


def _check_together(job: Job) -> None:
    """Settings that need or exclude each other."""
    if job.finish_by is not None and job.within is not None:
        raise InvalidArgumentError("settings finish_by and within exclude each other")
    if job.prompt is not None and job.template is not None:
        raise InvalidArgumentError("settings prompt and template exclude each other")
    if job.task == "map" and job.map is None:
        raise InvalidArgumentError("task map needs the setting map: MODULE:FUNCTION")
    is_openai = job.input_format == "openai"
    if job.task != "map" and job.model is None and not is_openai:
        raise InvalidArgumentError(f"task {job.task} needs the setting model")
    for path in (job.input, *job.more_inputs):
        if _is_in(job.output, path):
            raise InvalidArgumentError.of("output", job.output, "outside of the input")
    Encoding(job.encoding, job.decode_errors).check()
    if job.delimiter is not None:
        check_delimiter(job.delimiter)
    if job.truncate == "chunk-mean" and job.task != "embed":
        bound = f"end or error for task {job.task}: only the vectors of embed have a mean"
        raise InvalidArgumentError.of("truncate", job.truncate, bound)
    if job.output_column is not None and (job.task == "map" or is_openai):
        what = "openai lines" if is_openai else "task map"
        raise InvalidArgumentError(f"setting output_column is not for {what}")
    if job.shard is not None:
        Shard.of(job.shard)
        for name in ("limit", "ray", "journal"):
            if getattr(job, name) is not None:
                raise InvalidArgumentError(f"settings {name} and shard exclude each other")
    if job.output_format == "parquet" and is_openai:
        raise InvalidArgumentError.of("output_format", "parquet", "jsonl for openai lines")
    if is_openai and job.task not in ("generate", "embed", "map"):
        raise InvalidArgumentError.of("task", job.task, "generate or embed, for openai lines")
    if job.server is not None:
        is_url = re.fullmatch("https?://[^/]+", job.server) is not None
        needs_url = is_openai
        if is_url != needs_url:
            bound = "HOST:PORT, or http://HOST:PORT for openai lines and no others"
            raise InvalidArgumentError.of("server", job.server, bound)


def _is_in(path: str, folder: str) -> bool:
    """Whether a path is a folder's own or leads into it, through whatever links."""
    if f"{path}/".startswith(f"{folder}/"):
        return True
    if "://" in path or "://" in folder:
        return False
    return f"{os.path.realpath(path)}/".startswith(f"{os.path.realpath(folder)}/")


def read_job(path: Path) -> dict[str, Any]:
    """The settings of a job file. Raises InvalidArgumentError."""
    try:
        import yaml
    except ImportError:
        raise InstallationError(f"a job file needs pyyaml: {install_extra('jobs')}") from None

    class Loader(yaml.SafeLoader):
        """YAML 1.1 takes 16:00 for the number 960; here it stays a text."""

        def construct_number(self, node: yaml.ScalarNode) -> int | str:
            return node.value if ":" in node.value else self.construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_number)
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgumentError(f"the job file {path} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise InvalidArgumentError(f"the job file {path} must hold settings, such as 'input: …'")
    return settings


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

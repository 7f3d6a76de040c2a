"""A job's settings: the options of ``jitney batch run``, which are also the keys of a job file.

Each field's bound and help stand with it; the command line is made from them (``command.py``).
"""

import os
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from jitney.errors import InstallationError, InvalidArgumentError, nearest, show
from jitney.field_types import field_at_fault
from msgspec import Meta

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
STOPPED = 130
"""The exit status that shells expect of an interrupted command."""
LATE = 4
"""The exit status of a job that is complete, but later than it was to be."""
Count = Annotated[int, Meta(ge=1)]
CountOrNone = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Text = str | None
Texts = list[str]
Numbers = tuple[float, ...]
TaskName = Literal["generate", "embed", "classify", "score", "map"]
InputFormat = Literal["auto", "parquet", "jsonl", "csv", "arrow", "text", "image", "openai"]
OutputFormat = Literal["auto", "parquet", "jsonl"]


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job. Checked by :func:`make_job`."""

    input: str
    output: str
    model: Annotated[Text, "Checkpoint (folder, or id in the local hub), or exported model."] = None
    server: Annotated[Text, "HOST:PORT of a Triton with that model; http:// for OpenAI lines."] = (
        None
    )
    tls: Annotated[bool, "The server, or a proxy before it, speaks TLS."] = False
    ca_file: Annotated[Text, "PEM file that its certificate is checked with; implies TLS."] = None
    api_key_file: Annotated[Text, "File with the key for that proxy, as bench takes it."] = None
    at_once: Annotated[Count, "Requests under way to the server."] = 32
    ray: Annotated[Text, "Address of a Ray cluster (auto: of this node), or local."] = None
    task: Annotated[TaskName, "What is done with each row."] = "generate"
    input_format: Annotated[InputFormat, "auto goes by the files' names."] = "auto"
    output_format: Annotated[OutputFormat, "auto: jsonl for input in lines, else parquet."] = "auto"
    keep: Annotated[Texts | None, "Write only this column of the input; several times."] = None
    prompt: Annotated[Text, "With columns in braces: 'Summarize: {text}'."] = None
    template: Annotated[Text, "A jinja template of the prompt, or its file."] = None
    column: Annotated[str, "What is taken without --prompt and --template."] = "text"
    chat: Annotated[bool, "The prompt is a user's message, or a list of messages."] = False
    max_tokens: Annotated[int | None, "Most tokens of an answer."] = None
    sampling: Annotated[dict[str, Any], 'Parameters as JSON: {"temperature": 0.7}.'] = {}
    sampling_column: Annotated[Texts, "Column of that parameter's values; several times."] = []
    engine: Annotated[dict[str, Any], 'Engine options: {"max_num_seqs": 64}.'] = {}
    tokenizer: Annotated[Text, "tokenizer.json of an exported model. Default: beside it."] = None
    result: Annotated[Text, "The model's output that is taken."] = None
    labels: Annotated[Text, "File of the classes' names, one a line."] = None
    mean: Annotated[Numbers, "Taken off an image's channels of 0 to 1; once for each."] = (0.0,)
    std: Annotated[Numbers, "What the channels are divided by then; once for each."] = (1.0,)
    batch_size: Annotated[Count | None, "Of an exported model. Default: the fastest, tried."] = None
    map: Annotated[Text, "MODULE:FUNCTION from a row to new columns."] = None
    journal: Annotated[Text, "Local folder of the journal. Default: _job in the output."] = None
    ordered: Annotated[bool, "Keep the rows' order."] = False
    part_rows: Annotated[Count, "Most rows of an output file."] = 10_000
    part_seconds: Annotated[Seconds, "Commit after so long, even if a part is small."] = 60.0
    in_flight: Annotated[Count, "Most rows between reading and writing."] = 8192
    workers: Annotated[CountOrNone | None, "Processes that prepare. Default: half the cores."] = (
        None
    )
    retries: Annotated[CountOrNone, "How often a transient error is tried again."] = 3
    max_errors: Annotated[str | int | float, "Bad rows that end the job: a number or share."] = (
        "10%"
    )

    finish_by: Annotated[str | int | None, "Clock time, 06:00, after which the job is late."] = None
    within: Annotated[Text, "Time, 4h or 1h30m, after which the job is late."] = None
    metrics_port: Annotated[Port | None, "Serve metrics there while it runs; 0: any port."] = None
    metrics_host: Annotated[str, "Address for that; 0.0.0.0 for all networks."] = "127.0.0.1"
    push_gateway: Annotated[Text, "URL of a Prometheus push gateway that gets the metrics."] = None
    name: Annotated[Text, "The job's name in its metrics. Default: the output folder's."] = None

    @property
    def essential(self) -> dict[str, Any]:
        """The fields that shape the output."""
        return {k: v for k, v in msgspec.to_builtins(self).items() if k not in _PACE}

    @property
    def journal_folder(self) -> Path:
        """Raises InvalidArgumentError if there is no place for it."""
        if self.journal is None and "://" in self.output:
            raise InvalidArgumentError("output is not local: name a local folder for the journal")
        return Path(self.output, "_job") if self.journal is None else Path(self.journal)

    @property
    def most_errors(self) -> tuple[int | None, float | None]:
        """Bad rows allowed: a number or a share."""
        text = str(self.max_errors)
        try:
            if text.endswith("%") or "." in text:
                share = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
                if 0 <= share <= 1:
                    return None, share
            elif int(text) >= 0:
                return int(text), None
        except ValueError:
            pass
        raise InvalidArgumentError.of("max_errors", text, "a number, or a share from 0 to 100%")


_PACE = {
    *("part_rows", "part_seconds", "in_flight", "workers", "retries", "max_errors", "journal"),
    *("batch_size", "at_once", "ray", "finish_by", "within", "server", "tls", "ca_file"),
    *("api_key_file", "metrics_port", "metrics_host", "push_gateway", "name", "output"),
}
"""Fields that a job may change on its way."""


def make_job(settings: dict[str, Any]) -> Job:
    """Check settings. Raises InvalidArgumentError that names the field, the value and the bound."""
    names = [field.encode_name for field in msgspec.structs.fields(Job)]
    for name in settings:
        if name not in names:
            raise InvalidArgumentError(f"setting {name!r} is unknown{nearest(str(name), names)}")
    for name in ("input", "output"):
        if not settings.get(name):
            raise InvalidArgumentError(f"setting {name} is missing")
    for name in ("sampling", "engine"):
        if isinstance(settings.get(name), str):
            try:
                settings = {**settings, name: msgspec.json.decode(settings[name])}
            except msgspec.DecodeError as error:
                raise InvalidArgumentError(f"{name} is not JSON: {error}") from None
    try:
        job = msgspec.convert(settings, Job, strict=False)
    except msgspec.ValidationError as error:
        name = field_at_fault(error)
        bound = str(error).partition(" - at")[0].replace("Expected", "expected")
        raise InvalidArgumentError(f"{name} is {show(settings[name])}: {bound}") from None
    places = {name: getattr(job, name) for name in ("input", "output", "ca_file", "api_key_file")}
    changes: dict[str, Any] = {name: _absolute(each) for name, each in places.items() if each}
    if job.input_format == "openai":
        changes["keep"] = []  # the result is a whole line
    if job.model is not None and job.server is None and Path(job.model).exists():
        changes["model"] = _absolute(job.model)
    for name in ("template", "labels"):
        text = getattr(job, name)
        if text is not None and os.path.isfile(text):
            changes[name] = Path(text).read_text(encoding="utf-8")
        elif text is not None and (name == "labels" or "{" not in text):
            raise InvalidArgumentError.of(name, text, "a file that is there")
    job = msgspec.structs.replace(job, **changes)
    job.most_errors  # noqa: B018 - raises
    due_at(job.finish_by, job.within, 0.0)
    if job.finish_by is not None and job.within is not None:
        raise InvalidArgumentError("settings finish_by and within exclude each other")
    openai = job.input_format == "openai"
    if f"{job.output}/".startswith(f"{job.input}/"):
        raise InvalidArgumentError.of("output", job.output, "outside of the input")
    if job.task == "map" and job.map is None:
        raise InvalidArgumentError("task map needs the setting map: MODULE:FUNCTION")
    if job.task != "map" and job.model is None:
        raise InvalidArgumentError(f"task {job.task} needs the setting model")
    if job.server is not None and openai != bool(re.fullmatch("https?://[^/]+", job.server)):
        bound = "HOST:PORT, or http://HOST:PORT for openai lines and no others"
        raise InvalidArgumentError.of("server", job.server, bound)
    if job.prompt is not None and job.template is not None:
        raise InvalidArgumentError("settings prompt and template exclude each other")
    if job.output_format == "parquet" and openai:
        raise InvalidArgumentError.of("output_format", "parquet", "jsonl for openai lines")
    return job


def due_at(finish_by: str | int | None, within: str | None, now: float) -> float | None:
    """When the job is to end; times in seconds since 1970. A clock time that has passed today means
    tomorrow's. Raises InvalidArgumentError."""
    if within is not None:
        pieces = re.findall(r"(\d+(?:\.\d+)?)([dhms])", within)
        seconds = sum(float(number) * _UNITS[unit] for number, unit in pieces)
        if "".join(number + unit for number, unit in pieces) != within or not 0 < seconds <= 1e9:
            raise InvalidArgumentError.of("within", within, "a time such as 4h, 90m or 1h30m")
        return now + seconds
    if finish_by is None:
        return None
    if isinstance(finish_by, int):  # YAML takes 16:00 for a number of minutes
        finish_by = "{}:{:02}".format(*divmod(finish_by, 60))
    try:
        clock = datetime.strptime(finish_by, "%H:%M").time()
    except ValueError:
        bound = "a clock time of this machine, such as 06:00"
        raise InvalidArgumentError.of("finish_by", finish_by, bound) from None
    due = datetime.combine(datetime.fromtimestamp(now).date(), clock)
    if due.timestamp() <= now:
        due += timedelta(days=1)
    return due.timestamp()


def _absolute(place: str) -> str:
    """So that a job can be resumed from elsewhere."""
    return place if "://" in place else os.path.abspath(place)


def read_job(path: Path) -> dict[str, Any]:
    """The settings of a job file. Raises InvalidArgumentError."""
    try:
        import yaml
    except ImportError:
        raise InstallationError(
            "a job file needs pyyaml: pip install 'triton-jitney[jobs]'"
        ) from None
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgumentError(f"the job file {path} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise InvalidArgumentError(f"the job file {path} must hold settings, such as 'input: …'")
    return settings


def differences(before: Job, now: Job) -> list[str]:
    """The settings that shape the output and differ: ``prompt was 'a', is 'b'``."""
    old = before.essential
    new = now.essential
    return [f"{k} was {show(old[k])}, is {show(new[k])}" for k in old if old[k] != new[k]]

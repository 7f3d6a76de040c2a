"""Makes a job of its settings: they come from the command line or from a job file, and each is
checked, alone and together with the others.
"""

import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec
from jitney.errors import InstallationError, InvalidArgumentError, install_extra, nearest, show
from jitney.field_types import field_at_fault

from jitney_jobs.addresses import errors_without_keys
from jitney_jobs.delimiters import check_delimiter
from jitney_jobs.encodings import Encoding
from jitney_jobs.job import Job, absolute_paths
from jitney_jobs.outcome import error_limit
from jitney_jobs.shards import Shard
from jitney_jobs.times import date_text, due_at, seconds_of, with_zone

_CLOCK_TIME = "a clock time of this machine, such as 06:00"
_RUN_NAME = re.compile(r"[\w.+:-]+")
_PATHS_WITH_PLACEHOLDERS = ("input", "more_inputs", "output", "journal")


@errors_without_keys()
def make_job(settings: dict[str, Any]) -> Job:
    """Make a job of settings, and check them. Raises InvalidArgumentError that names the field, the
    value and the bound."""
    settings = _with_one_input(settings)
    _check_names(settings)
    settings = _with_filled_paths(settings)
    settings = _decoded(settings)
    job = _converted(settings)
    job = msgspec.structs.replace(job, **absolute_paths(job), **_contents_of_files(job))
    if job.input_format == "openai":
        job = msgspec.structs.replace(job, keep=[])  # the result is a whole line
    _check_alone(job)
    if isinstance(job.finish_by, str):
        job = msgspec.structs.replace(job, finish_by=with_zone(job.finish_by))
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
    """A path of the setting ``name``, with its placeholders filled."""
    if not isinstance(path, str):
        return path  # its type is checked later
    if "{run}" in path and run is None:
        raise InvalidArgumentError(f"{name} has {{run}}: name this run with the setting run")
    return path.replace("{run}", str(run)).replace("{date}", date_text(time.time()))


def _with_one_input(settings: dict[str, Any]) -> dict[str, Any]:
    """With one path as ``input``. If that is a list, its first path stays there, and the others go
    to ``more_inputs``."""
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
    """With objects for ``sampling`` and ``engine``, which the command line gives as JSON."""
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
    """A job whose fields have their types and keep the bounds that stand with them."""
    try:
        return msgspec.convert(settings, Job, strict=False)
    except msgspec.ValidationError as error:
        name = field_at_fault(error)
        bound = str(error).partition(" - at")[0].replace("Expected", "expected")
        raise InvalidArgumentError(f"{name} is {show(settings[name])}: {bound}") from None


def _contents_of_files(job: Job) -> dict[str, str]:
    """The text of each file whose name a setting has, by the setting. The job keeps the text: the
    file may change."""
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


def _check_alone(job: Job) -> None:
    """Check the settings that are texts with a form of their own, each alone."""
    error_limit(job.max_errors)
    if isinstance(job.finish_by, int):
        raise InvalidArgumentError.of("finish_by", job.finish_by, _CLOCK_TIME)
    due_at(job.finish_by, job.within, 0.0)
    seconds_of("patience", job.patience)
    seconds_of("watchdog", job.watchdog, least_s=1.0)


def _check_together(job: Job) -> None:
    """Check settings that need or exclude each other."""
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
        _check_shard(job, job.shard)
    if is_openai:
        _check_openai(job)
    if job.server is not None:
        is_url = re.fullmatch("https?://[^/]+", job.server) is not None
        needs_url = is_openai
        if is_url != needs_url:
            bound = "HOST:PORT, or http://HOST:PORT for openai lines and no others"
            raise InvalidArgumentError.of("server", job.server, bound)


def _check_shard(job: Job, shard: str) -> None:
    """Check what a shard of a job may be."""
    Shard.of(shard)
    for name in ("limit", "ray", "journal"):
        if getattr(job, name) is not None:
            raise InvalidArgumentError(f"settings {name} and shard exclude each other")


def _check_openai(job: Job) -> None:
    """Check what a job of lines for OpenAI's API may be."""
    if job.output_format == "parquet":
        raise InvalidArgumentError.of("output_format", "parquet", "jsonl for openai lines")
    if job.task not in ("generate", "embed", "map"):
        raise InvalidArgumentError.of("task", job.task, "generate or embed, for openai lines")


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

"""The model that is tuned: what its ``config.pbtxt`` says, a setting put into it, and its server.

The text is read by protobuf with the schema that Triton's client library carries. Nothing of the
user's repository is written: each setting gets a server over a folder of links to the models.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitney.config import EngineConfig
from jitney.errors import InstallationError, InvalidArgumentError, install_extra, nearest
from jitney.read_config import load_config
from jitney_server.server import TritonServer

from jitney_measure.axes import BATCH, INSTANCES, WINDOW, AxisOptions, Setting
from jitney_measure.options import Shared
from jitney_measure.target import Target

try:
    from google.protobuf import json_format, text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig
except ImportError:
    raise InstallationError(
        f"config.pbtxt is read with Triton's client library, which is not installed: "
        f"{install_extra('server')}"
    ) from None

# What the engine takes without max_num_batched_tokens.
_DEFAULT_TOKENS_ON_CPU = 512
_DEFAULT_TOKENS_ON_GPU = 8192


@dataclass(frozen=True)
class Subject:
    """A model of the repository. ``config`` is the server's ModelConfig message."""

    name: str
    repository: Path
    config: Any
    engine: EngineConfig | None  # the options of a language model; None of any other

    @property
    def language(self) -> bool:
        return self.engine is not None

    @property
    def can_change_instances(self) -> bool:
        """Whether there is one number of instances, not one for each of several groups."""
        return len(self.config.instance_group) <= 1

    def is_on_gpu(self) -> bool:
        """Whether the language model runs on a GPU of this machine, as far as can be told."""
        assert self.engine is not None
        if self.engine.device != "auto":
            return self.engine.device.startswith("cuda")
        on_cpu = any(group.kind == group.KIND_CPU for group in self.config.instance_group)
        return not on_cpu and Path("/dev/nvidia0").exists()

    def current(self) -> Setting:
        """What the configuration says. The server adds defaults to it, which are not known here."""
        if self.engine is not None:
            sequences = self.engine.max_num_seqs
            tokens = self.engine.max_num_batched_tokens
            if tokens is None:
                tokens = _DEFAULT_TOKENS_ON_GPU if self.is_on_gpu() else _DEFAULT_TOKENS_ON_CPU
                tokens = max(tokens, sequences)
            return (sequences, tokens)
        return read_setting(
            json_format.MessageToDict(self.config, preserving_proto_field_name=True)
        )

    def check_options(self, given: AxisOptions, shared: Shared) -> None:
        """Raise InvalidArgumentError for an axis that the model does not have, or for requests that
        are not of its kind."""
        unfit: dict[str, Any]
        if self.language:
            kind = "a language model"
            unfit = {
                "batch_sizes": given.batch_sizes,
                "windows": given.windows,
                "instances": given.instances,
                "shape": " ".join(shared.shape or ()),
            }
        else:
            kind = "no language model"
            unfit = {
                "max_num_seqs": given.max_num_seqs,
                "token_budgets": given.token_budgets,
                "prompts": shared.prompts,
                "natural_end": shared.natural_end,
            }
        for name, value in unfit.items():
            if value:
                raise InvalidArgumentError.of(name, str(value), f"left out: {self.name} is {kind}")
        if given.instances and not self.can_change_instances:
            expected = (
                f"left out: {self.name} has several instance groups, which are left as they are"
            )
            raise InvalidArgumentError.of("instances", given.instances, expected)

    def models_beside(self, names: Sequence[str]) -> tuple[str, ...]:
        """The models that the server loads as well, each of them once. Raises
        InvalidArgumentError for the model that is tuned, and for one that is not there."""
        present = sorted(path.name for path in self.repository.iterdir() if path.is_dir())
        for name in names:
            if name == self.name:
                raise InvalidArgumentError.of("beside", name, "a model other than the tuned one")
            if name not in present:
                hint = nearest(name, present)
                raise InvalidArgumentError.of("beside", name, f"a model of {self.repository}{hint}")
        return tuple(dict.fromkeys(names))

    def with_setting(self, values: Mapping[str, int]) -> Any:
        """The configuration with a setting in it, all else as it is."""
        changed = ModelConfig()
        changed.CopyFrom(self.config)
        if self.language:
            for name, value in values.items():
                changed.parameters[name].string_value = str(value)
            return changed
        batching = changed.dynamic_batching
        if values[BATCH] > 1 or changed.HasField("dynamic_batching"):
            batching.SetInParent()
            del batching.preferred_batch_size[:]
            # Without a preferred size, batches grow to max_batch_size.
            if values[BATCH] < self.config.max_batch_size:
                batching.preferred_batch_size.append(values[BATCH])
            batching.max_queue_delay_microseconds = values[WINDOW]
        if self.can_change_instances:
            groups = changed.instance_group
            group = groups[0] if groups else groups.add()
            group.count = values[INSTANCES]
        return changed

    def lines(self, values: Mapping[str, int]) -> str:
        """The complete blocks of config.pbtxt that contain the setting, as text."""
        whole = self.with_setting(values)
        part = ModelConfig()
        if self.language:
            for name in values:
                part.parameters[name].CopyFrom(whole.parameters[name])
        else:
            if whole.HasField("dynamic_batching"):
                part.dynamic_batching.CopyFrom(whole.dynamic_batching)
            if self.can_change_instances:
                part.instance_group.extend(whole.instance_group)
        return str(text_format.MessageToString(part)).strip()


def read_setting(config: Mapping[str, Any]) -> Setting:
    """Batch, window and instances of a configuration in the server's JSON form.

    Of several preferred sizes the largest counts; without any, max_batch_size. Without
    dynamic_batching a batch is one request.
    """
    groups = config.get("instance_group") or [{}]
    instances = int(groups[0].get("count", 1)) or 1
    batching = config.get("dynamic_batching")
    if batching is None:
        return (1, 0, instances)
    preferred = [int(size) for size in batching.get("preferred_batch_size", [])]
    batch = max(preferred, default=int(config["max_batch_size"]))
    window = 0
    if batch > 1:  # else nothing waits for a batch
        window = int(batching.get("max_queue_delay_microseconds", 0))
    return (batch, window, instances)


def read_subject(repository: Path, name: str) -> Subject:
    """Raises InvalidArgumentError for what cannot be tuned, ConfigError for a wrong model.json."""
    if not repository.is_dir():
        raise InvalidArgumentError.of("repository", str(repository), "a folder of models")
    present = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if name not in present:
        hint = nearest(name, present)
        listed = ", ".join(present) or "none"
        expected = f"one of {repository} with a config.pbtxt{hint}: {listed}"
        raise InvalidArgumentError.of("model", name, expected)
    path = repository / name / "config.pbtxt"
    try:
        config = text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from None
    if config.backend == "jitney":
        engine = _read_engine_options(repository / name, config)
        return Subject(name=name, repository=repository, config=config, engine=engine)
    if config.platform == "ensemble" or config.HasField("ensemble_scheduling"):
        raise _not_tunable(name, "no ensemble: tune its parts")
    if config.max_batch_size < 1:
        expected = "one with max_batch_size: without it nothing can be tuned"
        raise _not_tunable(name, expected)
    if config.HasField("sequence_batching"):
        raise _not_tunable(name, "one without sequence_batching")
    if config.model_transaction_policy.decoupled:
        raise _not_tunable(name, "one with one response per request")
    return Subject(name=name, repository=repository, config=config, engine=None)


def _read_engine_options(model: Path, config: Any) -> EngineConfig:
    """The options of the model's newest version. A parameter of config.pbtxt overrides the option
    of that name in model.json. Parameters whose names are in capitals are the server's own."""
    parameters = {}
    for name, value in config.parameters.items():
        if not name.isupper():
            parameters[name] = value.string_value
    versions = [path.name for path in model.iterdir() if path.name.isdecimal()]
    newest = max(versions, key=int, default="1")
    return load_config(model / newest / "model.json", parameters)


def _not_tunable(name: str, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError.of("model", name, expected)


@contextmanager
def serve(
    subject: Subject, values: Mapping[str, int] | None, beside: Sequence[str], timeout_s: float
) -> Iterator[Target]:
    """A server of its own with the model in a setting; None: as the repository has it.

    ``beside``: models that the server loads as well, because the tuned one calls them. Raises
    LoadError with the server's reason; InstallationError if there is no server. Ctrl-C while the
    server stops ends it at once.
    """
    with tempfile.TemporaryDirectory(prefix="jitney-tune-") as folder:
        repository = Path(folder)
        source = subject.repository.resolve()
        for name in beside:
            (repository / name).symlink_to(source / name)
        model = repository / subject.name
        model.mkdir()
        for path in (source / subject.name).iterdir():
            if path.name != "config.pbtxt":
                (model / path.name).symlink_to(path)
        config = subject.config if values is None else subject.with_setting(values)
        text = str(text_format.MessageToString(config))
        (model / "config.pbtxt").write_text(text, encoding="utf-8")
        server = TritonServer(repository, models=[subject.name, *beside])
        server.start(timeout_s)
        try:
            yield Target.of(server.grpc_url, server.http_url, server.metrics_url)
        finally:
            try:
                server.stop()
            except KeyboardInterrupt:
                server.stop(0)
                raise

"""The model that is tuned: what its ``config.pbtxt`` says, and settings put into it.

The text is read by protobuf with the schema that Triton's client library carries. Nothing of the
user's repository is written: a setting becomes the ``config`` of a load request, and text lines.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitney.config import EngineConfig, load_config
from jitney.errors import InstallationError, InvalidArgumentError, nearest
from jitney.sweep.target import Model, Tensor
from jitney.tune.setting import BATCH, INSTANCES, SEQUENCES, TOKENS, WINDOW, Setting

_TOKENS = {False: 512, True: 8192}
"""What the engine takes without max_num_batched_tokens, without and with a GPU."""


@dataclass(frozen=True)
class Subject:
    """A model of the repository. ``config`` is the server's ModelConfig message."""

    name: str
    repository: Path
    config: Any
    engine: EngineConfig | None
    """The options of a language model; None of any other."""

    @property
    def language(self) -> bool:
        return self.engine is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the axes."""
        return (SEQUENCES, TOKENS) if self.language else (BATCH, WINDOW, INSTANCES)

    @property
    def max_batch(self) -> int:
        """max_batch_size."""
        return int(self.config.max_batch_size)

    @property
    def counts_instances(self) -> bool:
        """Whether there is one number of instances to change."""
        return len(self.config.instance_group) <= 1

    def gpu(self) -> bool:
        """Whether the language model runs on a GPU of this machine, as far as can be told."""
        assert self.engine is not None
        if self.engine.device != "auto":
            return self.engine.device.startswith("cuda")
        kinds = {_kind(group) for group in self.config.instance_group} or {"KIND_AUTO"}
        return "KIND_CPU" not in kinds and Path("/dev/nvidia0").exists()

    def current(self) -> Setting:
        """What the configuration says, before the server has completed it."""
        if self.engine is not None:
            tokens = self.engine.max_num_batched_tokens or _TOKENS[self.gpu()]
            return (self.engine.max_num_seqs, tokens)
        return read_setting(_to_dict(self.config))

    def model(self) -> Model | None:
        """As a sweep needs to know it; None if its inputs are left to the server."""
        if not self.config.input:
            return None
        said = _to_dict(self.config)
        inputs = tuple(
            Tensor(
                tensor["name"],
                tensor["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES"),
                tuple(int(size) for size in tensor.get("dims", [])),
                bool(tensor.get("optional", False)),
            )
            for tensor in said["input"]
        )
        outputs = tuple(tensor["name"] for tensor in said.get("output", []))
        return Model(self.name, inputs, self.max_batch, False, (), outputs)

    def with_setting(self, values: Mapping[str, int]) -> Any:
        """The configuration with a setting in it, all else as it is."""
        made = type(self.config)()
        made.CopyFrom(self.config)
        if self.language:
            for name, value in values.items():
                made.parameters[name].string_value = str(value)
            return made
        batching = made.dynamic_batching
        if values[BATCH] > 1 or made.HasField("dynamic_batching"):
            batching.SetInParent()
            del batching.preferred_batch_size[:]
            if values[BATCH] < self.max_batch:
                batching.preferred_batch_size.append(values[BATCH])
            batching.max_queue_delay_microseconds = values[WINDOW]
        if self.counts_instances:
            group = made.instance_group[0] if made.instance_group else made.instance_group.add()
            group.count = values[INSTANCES]
        return made

    def override(self, values: Mapping[str, int]) -> str:
        """For the server's load request."""
        return json.dumps(_to_dict(self.with_setting(values)))

    def lines(self, values: Mapping[str, int]) -> str:
        """The parts of config.pbtxt that the setting is in, whole, as text."""
        from google.protobuf import text_format

        made = self.with_setting(values)
        part = type(made)()
        if self.language:
            for name in values:
                part.parameters[name].CopyFrom(made.parameters[name])
        else:
            if made.HasField("dynamic_batching"):
                part.dynamic_batching.CopyFrom(made.dynamic_batching)
            if self.counts_instances:
                part.instance_group.extend(made.instance_group)
        return str(text_format.MessageToString(part)).strip()


def read_setting(config: Mapping[str, Any]) -> Setting:
    """Batch, window and instances of a configuration in the server's JSON form.

    Of several preferred sizes the greatest counts; without any, max_batch_size.
    """
    batching = config.get("dynamic_batching")
    groups = config.get("instance_group") or [{}]
    instances = int(groups[0].get("count", 1)) or 1
    if batching is None:
        return (1, 0, instances)
    preferred = [int(size) for size in batching.get("preferred_batch_size", [])]
    batch = max(preferred, default=int(config["max_batch_size"]))
    if batch == 1:
        return (1, 0, instances)
    return (batch, int(batching.get("max_queue_delay_microseconds", 0)), instances)


def read_subject(repository: Path, name: str) -> Subject:
    """Raises InvalidArgumentError for what cannot be tuned, ConfigError for a wrong model.json."""
    if not repository.is_dir():
        raise InvalidArgumentError.of("repository", str(repository), "a folder of models")
    present = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if name not in present:
        why = ""
        if name in (path.name for path in repository.iterdir() if path.is_dir()):
            why = "; its folder has no config.pbtxt, from which tuning sets out"
        raise InvalidArgumentError.of(
            "model", name,
            f"one of {repository}{why}{nearest(name, present)}: {', '.join(present) or 'none'}",
        )  # fmt: skip
    config = _parse(repository / name / "config.pbtxt")
    if config.backend == "jitney":
        options = {
            key: value.string_value
            for key, value in config.parameters.items()
            if not key.isupper()  # the server's own
        }
        path = _version_folder(repository / name) / "model.json"
        return Subject(name, repository, config, load_config(path, options))
    _check_batching(name, config)
    return Subject(name, repository, config, None)


def _check_batching(name: str, config: Any) -> None:
    if config.platform == "ensemble" or config.HasField("ensemble_scheduling"):
        parts = dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step)
        raise InvalidArgumentError.of(
            "model", name, f"no ensemble: tune its parts, {', '.join(parts)}"
        )
    if config.max_batch_size < 1:
        raise InvalidArgumentError.of(
            f"max_batch_size of {name}", config.max_batch_size,
            "at least 1: without batches there is nothing to tune",
        )  # fmt: skip
    if config.HasField("sequence_batching"):
        raise InvalidArgumentError.of(
            f"scheduler of {name}", "sequence_batching", "dynamic_batching, or none yet"
        )
    if config.model_transaction_policy.decoupled:
        raise InvalidArgumentError.of(
            f"decoupled of {name}", True, "false: one response per request is measured"
        )


def _parse(path: Path) -> Any:
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError:
        raise InstallationError(
            "config.pbtxt is read with Triton's client library, which is not installed: "
            "pip install 'triton-jitney[server]'"
        ) from None
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from None


def _to_dict(config: Any) -> dict[str, Any]:
    from google.protobuf import json_format

    made: dict[str, Any] = json_format.MessageToDict(config, preserving_proto_field_name=True)
    return made


def _kind(group: Any) -> str:
    return str(group.Kind.Name(group.kind))


def _version_folder(model: Path) -> Path:
    """The latest version, which is what the server loads unless told otherwise."""
    numbers = [int(path.name) for path in model.iterdir() if path.name.isdecimal()]
    if not numbers:
        raise InvalidArgumentError(f"{model} has no version folder, such as 1")
    return model / str(max(numbers))

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
from jitney.errors import InstallationError, InvalidArgumentError, nearest
from jitney.read_config import load_config
from jitney_server.server import TritonServer

from jitney_measure.axes import BATCH, INSTANCES, OPTIONS, WINDOW, Setting
from jitney_measure.target import Target

try:
    from google.protobuf import json_format, text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig
except ImportError:
    raise InstallationError(
        "config.pbtxt is read with Triton's client library, which is not installed: "
        "pip install 'triton-jitney[server]'"
    ) from None

_TOKENS = {False: 512, True: 8192}
"""What the engine takes without max_num_batched_tokens, without and with a GPU."""


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
    def counts_instances(self) -> bool:
        """Whether there is one number of instances to change."""
        return len(self.config.instance_group) <= 1

    def gpu(self) -> bool:
        """Whether the language model runs on a GPU of this machine, as far as can be told."""
        assert self.engine is not None
        if self.engine.device != "auto":
            return self.engine.device.startswith("cuda")
        on_cpu = any(group.kind == group.KIND_CPU for group in self.config.instance_group)
        return not on_cpu and Path("/dev/nvidia0").exists()

    def current(self) -> Setting:
        """What the configuration says, before the server has completed it."""
        if self.engine is not None:
            default = max(_TOKENS[self.gpu()], self.engine.max_num_seqs)
            return (self.engine.max_num_seqs, self.engine.max_num_batched_tokens or default)
        return read_setting(
            json_format.MessageToDict(self.config, preserving_proto_field_name=True)
        )

    def check_options(self, given: Mapping[str, Any]) -> None:
        """Raise InvalidArgumentError for an axis that the model does not have, or for requests that
        are not of its kind."""
        kind = "a language model" if self.language else "no language model"
        requests = ("shape",) if self.language else ("prompts", "natural_end")
        for name in (*OPTIONS[not self.language].values(), *requests):
            if value := given[name]:
                shown = " ".join(value) if isinstance(value, list) else str(value)
                raise InvalidArgumentError.of(name, shown, f"left out: {self.name} is {kind}")
        if given["instances"] and not self.counts_instances:
            bound = f"left out: {self.name} has several instance groups, which are left as they are"
            raise InvalidArgumentError.of("instances", given["instances"], bound)

    def with_setting(self, values: Mapping[str, int]) -> Any:
        """The configuration with a setting in it, all else as it is."""
        made = ModelConfig()
        made.CopyFrom(self.config)
        if self.language:
            for name, value in values.items():
                made.parameters[name].string_value = str(value)
            return made
        batching = made.dynamic_batching
        if values[BATCH] > 1 or made.HasField("dynamic_batching"):
            batching.SetInParent()
            del batching.preferred_batch_size[:]
            # Without a preferred size, batches grow to max_batch_size.
            if values[BATCH] < self.config.max_batch_size:
                batching.preferred_batch_size.append(values[BATCH])
            batching.max_queue_delay_microseconds = values[WINDOW]
        if self.counts_instances:
            group = made.instance_group[0] if made.instance_group else made.instance_group.add()
            group.count = values[INSTANCES]
        return made

    def lines(self, values: Mapping[str, int]) -> str:
        """The parts of config.pbtxt that the setting is in, whole, as text."""
        made = self.with_setting(values)
        part = ModelConfig()
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

    Of several preferred sizes the largest counts; without any, max_batch_size. Without
    dynamic_batching a batch is one request.
    """
    groups = config.get("instance_group") or [{}]
    instances = int(groups[0].get("count", 1)) or 1
    batching = config.get("dynamic_batching", {"preferred_batch_size": [1]})
    preferred = [int(size) for size in batching.get("preferred_batch_size", [])]
    batch = max(preferred, default=int(config["max_batch_size"]))
    window = int(batching.get("max_queue_delay_microseconds", 0)) if batch > 1 else 0
    return (batch, window, instances)


def read_subject(repository: Path, name: str) -> Subject:
    """Raises InvalidArgumentError for what cannot be tuned, ConfigError for a wrong model.json."""
    if not repository.is_dir():
        raise InvalidArgumentError.of("repository", str(repository), "a folder of models")
    present = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if name not in present:
        raise InvalidArgumentError.of(
            "model", name,
            f"one of {repository} with a config.pbtxt{nearest(name, present)}: "
            f"{', '.join(present) or 'none'}",
        )  # fmt: skip
    path = repository / name / "config.pbtxt"
    try:
        config = text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from None
    if config.backend == "jitney":
        texts = {key: value.string_value for key, value in config.parameters.items()}
        own = {key: text for key, text in texts.items() if not key.isupper()}  # not the server's
        versions = [path.name for path in (repository / name).iterdir() if path.name.isdecimal()]
        version = max(versions, key=int, default="1")
        engine = load_config(repository / name / version / "model.json", own)
        return Subject(name, repository, config, engine)
    ensemble = config.platform == "ensemble" or config.HasField("ensemble_scheduling")
    for refused, bound in (
        (ensemble, "no ensemble: tune its parts"),
        (config.max_batch_size < 1, "one with max_batch_size: without it nothing can be tuned"),
        (config.HasField("sequence_batching"), "one without sequence_batching"),
        (config.model_transaction_policy.decoupled, "one with one response per request"),
    ):
        if refused:
            raise InvalidArgumentError.of("model", name, bound)
    return Subject(name, repository, config, None)


@contextmanager
def serve(
    subject: Subject, values: Mapping[str, int] | None, beside: Sequence[str], timeout_s: float
) -> Iterator[Target]:
    """A server of its own with the model in a setting; None: as the repository has it.

    ``beside``: models that are loaded as well, because the tuned one calls them. Raises LoadError
    with the server's reason; InstallationError without a server. Ctrl-C while it stops ends it at
    once.
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

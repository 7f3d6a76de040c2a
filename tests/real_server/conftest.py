"""One real server for the session, with tiny random models in f32.

tiny      plenty of everything, in two instances, prompts of 4 MB
narrow    24 KV blocks of 16 tokens, 4 sequences, calls of tools, traces
busy      one sequence at a time, 2 places in the queue; a request may take a minute
"""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from jitney import LLM
from jitney_server.server import TritonServer

from tests.real_server.client import Reply, metric, stream, wait_until
from tests.real_server.collector import Collector
from tests.tiny_models import make_checkpoint

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "model_repository"
IDLE_S = 1.5
"""Of ``brief``, a copy of digit_stream with two slots."""
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16
"""K and V, 2 layers, 2 heads of 16 floats, 16 tokens."""
NARROW_BLOCKS = 24
CONTEXT = 4096
BUSY_CONTEXT = 16_384
"""That of ``busy``: a request that makes so many tokens does not end before a test looks at it, on
a machine with other work too."""
START_S = 900.0
"""For a server of several models on a busy machine, and kernels that are not yet compiled."""

MODELS: dict[str, dict[str, object]] = {
    "tiny": {"kv_cache_bytes": 2048 * BLOCK_BYTES, "max_prompt_bytes": 4 << 20},
    "narrow": {
        "kv_cache_bytes": NARROW_BLOCKS * BLOCK_BYTES,
        "max_num_seqs": 4,
        "max_model_len": 1024,
        "tool_format": "hermes",
    },
    "busy": {
        "kv_cache_bytes": BUSY_CONTEXT // 16 * BLOCK_BYTES,
        "max_num_seqs": 1,
        "max_queued": 2,
    },
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the server."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.server)


def write_model(
    repository: Path, name: str, options: dict[str, object], *, instances: int = 1
) -> Path:
    """A model folder with the smallest ``config.pbtxt`` and ``options`` in its model.json."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(
        f'backend: "jitney"\ninstance_group [{{ kind: KIND_CPU count: {instances} }}]\n',
        encoding="utf-8",
    )
    (version / "model.json").write_text(json.dumps(options), encoding="utf-8")
    return version


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte-level tokenizer and a context of 4,096 tokens. Its kernels
    are compiled: on a new machine all instances would do it at the same time."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, "llama", tokenizer=True, max_position_embeddings=CONTEXT)
    options = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_bytes": 1 << 22}
    LLM(str(folder), **options).close()
    return folder


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Gets the spans of ``narrow``."""
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, collector: Collector
) -> Iterator[TritonServer]:
    """The server, ready. It must stop in good order after whatever the tests did to it."""
    repository = tmp_path_factory.mktemp("repository")
    long = tmp_path_factory.mktemp("long") / "m"
    make_checkpoint(long, "llama", tokenizer=True, max_position_embeddings=BUSY_CONTEXT)
    models = {
        **MODELS,
        "narrow": {**MODELS["narrow"], "trace_endpoint": collector.endpoint},
        "busy": {**MODELS["busy"], "model": str(long)},
    }
    for name, options in models.items():
        write_model(
            repository,
            name,
            {"model": str(checkpoint), "dtype": "float32", "threads": 1, **options},
            instances=2 if name == "tiny" else 1,
        )
    started = TritonServer(repository, exit_timeout_s=60)
    started.start(START_S)
    try:
        yield started
        assert started.stop(), f"{started.last_stop.problem}\n{started.log_tail(40)}"
    finally:
        started.stop()


@pytest.fixture
def client(server: TritonServer) -> Iterator[grpc.InferenceServerClient]:
    """Of the server, or of the one that stands for it in a file of tests."""
    with grpc.InferenceServerClient(server.grpc_url) as connected:
        yield connected


@pytest.fixture(scope="session")
def models_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """What `make models` builds, and ``brief``. Its clients load and unload."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / "build_models.py")], check=True)
    repository = tmp_path_factory.mktemp("models")
    for name in ("digits", "minilm", "minilm_tokenizer", "embed", "rank", "digit_stream"):
        (repository / name).symlink_to(REPOSITORY / name)
    shutil.copytree(REPOSITORY / "digit_stream", repository / "brief")
    config = repository / "brief" / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    for key, before, after in (
        ("max_sequence_idle_microseconds", 30_000_000, int(IDLE_S * 1e6)),
        ("max_candidate_sequences", 64, 2),
    ):
        assert f"{key}: {before}" in text
        text = text.replace(f"{key}: {before}", f"{key}: {after}")
    config.write_text(text, encoding="utf-8")
    with TritonServer(repository, open_endpoints=True) as started:
        yield started
        assert started.stop(), started.last_stop.problem


@pytest.fixture(scope="session")
def solo_text(server: TritonServer) -> str:
    """What :func:`bystander` must say: the same request with nothing beside it."""
    return _bystand(server).text


def _bystand(server: TritonServer) -> Reply:
    return stream(
        server.grpc_url,
        "tiny",
        text_input="the passengers board while",
        sampling_parameters={"max_tokens": 250, "temperature": 0, "ignore_eos": True},
    )


@pytest.fixture
def bystander(server: TritonServer, solo_text: str) -> Iterator[None]:
    """Another client's stream that runs beside the test and must not notice anything of it; when
    both have ended, no KV block may be in use."""
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(_bystand(server)))
    thread.start()
    yield
    thread.join(120)
    assert replies, "the bystander's stream did not end"
    assert not replies[0].errors
    assert replies[0].text == solo_text
    assert replies[0].finals == 1
    for model in ("tiny", "narrow", "busy"):
        wait_until(lambda model=model: used_blocks(server, model) == 0)


def used_blocks(server: TritonServer, model: str) -> float:
    """KV blocks in use, as the metrics say (a quarter of a second late at most)."""
    return metric(server.metrics_url, "jitney_kv_used_blocks", model=model)


@pytest.fixture
def ask(server: TritonServer) -> Callable[..., Reply]:
    """``ask(text_input=…, max_tokens=…)``: a gRPC stream on ``tiny``, greedy and without ends of
    sequence unless the sampling parameters are given as ``sampling_parameters``."""

    def call(model: str = "tiny", **tensors: object) -> Reply:
        max_tokens = tensors.pop("max_tokens", 8)
        if not {"sampling_parameters", "parameters"} & tensors.keys():
            tensors["sampling_parameters"] = {
                "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
        if not {"text_input", "input_ids", "messages"} & tensors.keys():
            tensors["text_input"] = "the bus stops here"
        return stream(server.grpc_url, model, **tensors)

    return call

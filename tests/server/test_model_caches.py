"""The kind of cache of each language model of a repository, from its files."""

import json
from pathlib import Path

from jitney_server.model_caches import ModelCache, find_caches

from benchmarks.architectures.tiny import make_checkpoint

_PARAMETER = """
parameters { key: "max_model_len" value: { string_value: "9999" } }
parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "x" } }
"""


def add_model(repository: Path, name: str, config: str, checkpoint: str | None = None) -> None:
    version = repository / name / "2"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config, encoding="utf-8")
    if checkpoint is not None:
        make_checkpoint(version / "m", checkpoint)
        options = json.dumps({"model": "m"})
        (version / "model.json").write_text(options, encoding="utf-8")


def test_the_models_of_the_backend_are_named(tmp_path: Path) -> None:
    backend = 'backend: "jitney"'
    add_model(tmp_path, "a", backend, "llama")
    add_model(tmp_path, "b", f"# one\n{backend}", "gpt_neo")
    add_model(tmp_path, "c", backend + _PARAMETER, "llama")
    add_model(tmp_path, "d", backend)
    add_model(tmp_path, "e", '# backend: "jitney"\nbackend: "onnxruntime"')
    found = {each.name: each for each in find_caches(tmp_path)}
    assert found["a"] == ModelCache("a", kind="paged")
    assert found["b"] == ModelCache("b", kind="opaque")
    assert "max_model_len is 9999" in found["c"].problem
    assert found["d"].problem == "model.json is missing from the version folder"
    assert list(found) == ["a", "b", "c", "d"]

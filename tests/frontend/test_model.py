"""The class that the stub loads: what the server decides about an instance, and failed loads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jitney.config import EngineConfig
from jitney.frontend.model import TritonPythonModel, _start, assign_device

from tests.real_server.client import wait_until
from tests.tiny_models import make_checkpoint

REVISION = 40 * "a"


def arguments(kind: str, groups: list[dict[str, Any]], device: int = 0) -> dict[str, str]:
    return {
        "model_config": json.dumps({"instance_group": groups}),
        "model_instance_kind": kind,
        "model_instance_device_id": str(device),
        "model_instance_name": "m_0_0",
        "model_name": "m",
        "model_version": "1",
        "model_repository": "/nowhere/m",
    }


@pytest.mark.parametrize(
    ("kind", "groups", "device", "instances", "placed"),
    [
        ("CPU", [{"kind": "KIND_CPU", "count": 2}], 0, 2, "auto"),
        ("CPU", [{"kind": "KIND_CPU", "count": 2}, {"kind": "KIND_CPU"}], 0, 3, "auto"),
        ("CPU", [{"kind": "KIND_CPU"}, {"kind": "KIND_GPU", "gpus": [0]}], 0, 1, "auto"),
        ("CPU", [{"kind": "KIND_CPU"}, {"kind": "KIND_GPU", "gpus": [1]}], 0, 1, "auto"),
        ("GPU", [{"kind": "KIND_GPU", "count": 2, "gpus": [0, 1]}], 1, 2, "cuda:1"),
        ("GPU", [{"kind": "KIND_GPU", "count": 4, "gpus": [0]}], 0, 4, "cuda:0"),
        ("CPU", [], 0, 1, "auto"),
    ],
)  # fmt: skip
def test_instances_of_one_device_share_it(
    kind: str, groups: list[dict[str, Any]], device: int, instances: int, placed: str
) -> None:
    config = assign_device(EngineConfig(model="m"), arguments(kind, groups, device))
    assert (config.instances, config.device) == (instances, placed)


def test_a_device_in_the_options_is_kept() -> None:
    groups = [{"kind": "KIND_GPU", "count": 1, "gpus": [0]}]
    config = assign_device(EngineConfig(model="m", device="cpu"), arguments("GPU", groups))
    assert config.device == "cpu"


def test_a_failed_load_says_why_in_one_line(pb: Any, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.json").write_text('{"model": "x", "blocksize": 3}', encoding="utf-8")
    args = arguments("CPU", []) | {"model_repository": str(tmp_path)}
    with pytest.raises(pb.TritonModelException) as caught:
        TritonPythonModel().initialize(args)
    text = str(caught.value)
    assert text.startswith("INVALID_ARGUMENT: option 'blocksize' is unknown")
    assert "did you mean 'block_size'" in text


def test_a_checkpoint_that_is_not_there_starts_no_engine(
    pb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.json").write_text('{"model": "some/typo"}', encoding="utf-8")
    started: list[EngineConfig] = []
    monkeypatch.setattr("jitney.frontend.model._start", lambda config, args: started.append(config))
    args = arguments("CPU", []) | {"model_repository": str(tmp_path)}
    with pytest.raises(pb.TritonModelException, match="INVALID_ARGUMENT: option model is 'some/t"):
        TritonPythonModel().initialize(args)
    assert started == []


def test_parameters_of_the_configuration_are_options(pb: Any, tmp_path: Path) -> None:
    """A wrong one is named as the same value in the file would be; capitals are the server's."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.json").write_text('{"model": "x"}', encoding="utf-8")
    given = {"EXECUTION_ENV_PATH": "/env", "max_num_seqs": "0"}
    config = {"parameters": {name: {"string_value": text} for name, text in given.items()}}
    args = arguments("CPU", []) | {
        "model_repository": str(tmp_path),
        "model_config": json.dumps(config),
    }
    with pytest.raises(pb.TritonModelException, match="max_num_seqs is 0, but must be from 1"):
        TritonPythonModel().initialize(args)


@pytest.mark.slow
def test_a_model_of_the_hub_cache_is_served(
    pb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "hub" / "models--some--model"
    make_checkpoint(home / "snapshots" / REVISION, "llama", tokenizer=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(REVISION, encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(home.parent))
    config = EngineConfig(
        model="some/model", device="cpu", attention="reference", fuse=False, kv_cache_bytes=1 << 20
    )
    service = _start(config, arguments("CPU", []))
    request = pb.Request(text_input="the bus", sampling_parameters='{"max_tokens": 3}')
    service.accept(request)
    wait_until(lambda: request.sender.final == 1)
    service.close()
    (response,) = request.sender.sent
    assert response.error is None
    assert response.tensors["text_output"][0].startswith(b"the bus")


def test_nothing_heavy_is_imported_to_complete_a_configuration() -> None:
    program = (
        "import sys, types; sys.modules['triton_python_backend_utils'] = types.ModuleType('x');"
        "from jitney.frontend.model import TritonPythonModel;"
        "print({'torch', 'transformers', 'numba', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert result.stdout.strip() == "set()"

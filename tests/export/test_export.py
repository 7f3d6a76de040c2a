"""The whole command: what it writes, what it leaves alone, and what it says."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from export.__main__ import main, require_libraries
from export.config_pbtxt import ExportTarget, config_text
from export.errors import CheckError, MissingToolError, RecipeError
from export.onnx_model import GraphTensor
from export.parity import onnx_run
from export.pipeline import export, plan
from export.publish import MARK, publish
from export.recipe import Quality
from export.recipes.digits import load_digits
from tests.export.tiny import pooled, silent
from tests.real_server.client import wait_until
from tests.signals import heed_signals

ROOT = Path(__file__).parents[2]
OWN = """
import torch
from torch import nn

def encoder():
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))
    return module, {"input": torch.randn(3, 5, 6)}, {"input": {0: "batch", 1: "time"}}
"""


def parsed(folder: Path) -> ModelConfig:
    text = (folder / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, ModelConfig())


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(each for each in (str(ROOT), os.environ.get("PYTHONPATH")) if each)
    return subprocess.run(
        [sys.executable, "-m", "export", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", "NO_COLOR": "1"},
        check=False,
    )


@pytest.mark.slow  # of its parts: the tests below, and test_served.py
def test_a_model_of_ones_own_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    result = command("own:encoder", "--onnx", "--int8", "--out", "served", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.search(r"served/encoder_int8 .* cosine [01]\.\d+ \(at least 0\.98\)", result.stdout)
    assert sorted(each.name for each in (tmp_path / "served").iterdir()) == [
        "encoder",
        "encoder_int8",
    ]
    config = parsed(tmp_path / "served" / "encoder")
    assert (config.name, config.backend, config.max_batch_size) == ("encoder", "onnxruntime", 8)
    assert [(each.name, list(each.dims)) for each in config.input] == [("input", [-1, 6])]
    assert [(each.name, list(each.dims)) for each in config.output] == [("output", [-1, 4])]
    sys_path = tmp_path / "served" / "encoder" / "1" / "model.onnx"
    namespace: dict[str, object] = {}
    exec(OWN, namespace)
    module, inputs, _ = namespace["encoder"]()  # type: ignore[operator]
    expected = module(inputs["input"]).detach().numpy()
    made = onnx_run(sys_path)({"input": inputs["input"].numpy()})["output"]
    np.testing.assert_allclose(made, expected, atol=1e-5)


@pytest.mark.usefixtures("without_tracing")
def test_the_configuration_says_what_the_server_needs(tmp_path: Path) -> None:
    recipe = pooled()
    (made,) = export(recipe, [ExportTarget("pooled", "onnx", "fp32")], tmp_path, silent())
    config = parsed(tmp_path / "pooled")
    assert config.default_model_filename == "model.onnx"
    assert config.max_batch_size == 4
    kinds = {each.name: (each.data_type, list(each.dims)) for each in config.input}
    assert kinds["tokens"] == (9, [-1])  # TYPE_INT64
    assert kinds["scale"] == (11, [1])  # TYPE_FP32, and a row of rank 0 as one value
    assert [each.HasField("reshape") for each in config.input] == [False, True]
    assert config.dynamic_batching.max_queue_delay_microseconds == recipe.max_queue_delay_us
    (group,) = config.instance_group
    assert (group.kind, group.count) == (ModelInstanceGroup.KIND_AUTO, 1)
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.name == "tensorrt"
    assert accelerator.parameters["trt_profile_min_shapes"] == "tokens:1x1,scale:1"
    assert accelerator.parameters["trt_profile_max_shapes"] == "tokens:4x9,scale:4"
    assert accelerator.parameters["precision_mode"] == "FP32"
    assert not config.optimization.execution_accelerators.cpu_execution_accelerator
    assert [each.batch_size for each in config.model_warmup] == [1, 4]
    assert config.model_warmup[0].inputs["tokens"].zero_data
    assert list(config.model_warmup[0].inputs["tokens"].dims) == [6]
    assert config.model_warmup[1].inputs["scale"].random_data
    assert made.difference <= recipe.tolerance


@pytest.mark.parametrize(
    ("target", "platform", "kind", "accelerators"),
    [
        (ExportTarget("pooled_int8", "onnx", "int8"), "", ModelInstanceGroup.KIND_CPU, 0),
        (ExportTarget("pooled_fp16", "onnx", "fp16"), "", ModelInstanceGroup.KIND_AUTO, 1),
        (
            ExportTarget("pooled", "tensorrt", "fp16"),
            "tensorrt_plan",
            ModelInstanceGroup.KIND_AUTO,
            0,
        ),
    ],
)
def test_configurations_of_other_targets(
    target: ExportTarget, platform: str, kind: int, accelerators: int
) -> None:
    ports = [GraphTensor("tokens", "int64", (None, None)), GraphTensor("scale", "float32", (None,))]
    text = config_text(pooled(), target, ports, [GraphTensor("scores", "float32", (None, 4))])
    config = text_format.Parse(text, ModelConfig())
    assert config.platform == platform
    assert config.default_model_filename == target.file
    assert config.instance_group[0].kind == kind
    given = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert len(given) == accelerators
    if accelerators:
        assert given[0].parameters["precision_mode"] == "FP16"


@pytest.mark.parametrize(
    ("port", "words"),
    [
        (GraphTensor("x", "bfloat16", (None, 2)), "bfloat16"),
        (GraphTensor("x", "float32", (3, 2)), "the batch"),
    ],
)
def test_what_no_configuration_can_say(port: GraphTensor, words: str) -> None:
    with pytest.raises(CheckError, match=words):
        config_text(pooled(), ExportTarget("pooled", "onnx", "fp32"), [port], [port])


@pytest.mark.usefixtures("without_tracing")
def test_a_failed_check_writes_nothing_and_leaves_what_was(tmp_path: Path) -> None:
    good = tmp_path / "pooled"
    (good / "1").mkdir(parents=True)
    (good / "1" / "model.onnx").write_bytes(b"an earlier model")
    (good / "config.pbtxt").write_text(MARK, encoding="utf-8")
    recipe = pooled(
        quality=lambda: Quality(
            "cosine", pooled().make_inputs({"batch": 2, "length": 3}), "scores", {"int8": 1.1}
        )
    )
    targets = [ExportTarget("pooled", "onnx", "fp32"), ExportTarget("pooled_int8", "onnx", "int8")]
    with pytest.raises(CheckError, match="int8 loses too much"):
        export(recipe, targets, tmp_path, silent())
    assert [each.name for each in tmp_path.iterdir()] == ["pooled"], "the good half as little"
    assert (good / "1" / "model.onnx").read_bytes() == b"an earlier model"
    with pytest.raises(CheckError, match="differs"):
        export(replace(recipe, tolerance=-1.0), targets[:1], tmp_path, silent())
    assert (good / "1" / "model.onnx").read_bytes() == b"an earlier model"


def test_a_new_version_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "model.onnx").write_bytes(b"new")
    (work / "model.onnx.data").write_bytes(b"weights")
    served = tmp_path / "repository" / "pooled"
    for version in ("1", "2"):
        (served / version).mkdir(parents=True)
        (served / version / "model.plan").write_bytes(b"old")
    (served / "labels.txt").write_text("zero\n", encoding="utf-8")
    (served / ".built").write_text("of the old one, by make models", encoding="utf-8")
    publish(work, "name: 'pooled'\n", served)
    assert {str(each.relative_to(served)) for each in served.rglob("*") if each.is_file()} == {
        "1/model.onnx",
        "1/model.onnx.data",
        "2/model.plan",
        "labels.txt",
        "config.pbtxt",
    }
    assert [each.name for each in served.parent.iterdir()] == ["pooled"]


def test_ctrl_c_between_two_renames_puts_the_earlier_version_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, served = tmp_path / "work", tmp_path / "repository" / "pooled"
    for folder in (work, served):
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(folder.name.encode())
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == "fresh":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publish(work, "", served)
    assert (served / "model.onnx").read_bytes() == b"pooled"
    assert [each.name for each in served.parent.iterdir()] == ["pooled"]


def test_exports_at_once_end_with_one_whole_version(tmp_path: Path) -> None:
    served = tmp_path / "repository" / "pooled"
    works = []
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx").write_text(name, encoding="utf-8")
        works.append(tmp_path / name)

    def often(work: Path) -> None:
        for _ in range(30):
            publish(work, work.name, served)

    served.mkdir(parents=True)
    (served / "labels.txt").write_text("zero\n", encoding="utf-8")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(often, works))
    config = (served / "config.pbtxt").read_text(encoding="utf-8")
    assert (served / "1" / "model.onnx").read_text(encoding="utf-8") == config
    assert (served / "labels.txt").is_file()
    assert [each.name for each in served.parent.iterdir()] == ["pooled"]


@pytest.mark.usefixtures("without_tracing")
@pytest.mark.parametrize("config", ['name: "pooled"', None])
def test_a_model_of_another_hand_is_not_replaced(tmp_path: Path, config: str | None) -> None:
    written = tmp_path / "pooled" / "1" / "model.py"
    written.parent.mkdir(parents=True)
    written.write_text("by hand", encoding="utf-8")
    if config is not None:
        (tmp_path / "pooled" / "config.pbtxt").write_text(config, encoding="utf-8")
    target = ExportTarget("pooled", "onnx", "fp32")
    with pytest.raises(RecipeError, match=r"that no export has written.*--overwrite"):
        export(pooled(), [target], tmp_path, silent())
    assert written.read_text(encoding="utf-8") == "by hand"
    export(pooled(), [target], tmp_path, silent(), overwrite=True)
    assert not written.exists()
    export(pooled(), [target], tmp_path, silent())  # what an export has written needs no leave


def test_what_can_be_refused_early_is_refused_before_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The function leaves a trace when it is called."""
    (tmp_path / "late.py").write_text(
        "from pathlib import Path\ndef model(): Path('called').touch()\n", encoding="utf-8"
    )
    (tmp_path / "file").touch()
    cases = [
        (("--bf16",), "add --tensorrt"),
        (("--out", "file/deeper"), "file/deeper cannot be written: "),
    ]
    if importlib.util.find_spec("tensorrt") is None:
        cases.append((("--tensorrt",), "needs the Python module tensorrt"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for arguments, words in cases:
        monkeypatch.setattr(sys, "argv", ["export", "late:model", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        assert words in capsys.readouterr().err
        assert not (tmp_path / "called").exists()


INTERRUPTED = """
import pathlib, time, torch
from torch import nn
from export.recipe import Dimension, Recipe

def inputs_at(sizes):
    if sizes["batch"] == 8:  # in the comparison, after the tracing
        pathlib.Path("comparing").touch()
        time.sleep(60)
    return {"input": torch.rand(sizes["batch"], 3).numpy()}

def model():
    return Recipe(
        "model", nn.Linear(3, 2), {"input": torch.rand(2, 3)}, {"input": {0: "batch"}},
        {"batch": Dimension("batch", 1, 4, 8)}, ["made"], inputs_at=inputs_at,
    )
"""


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED, encoding="utf-8")
    (tmp_path / "temporary").mkdir()
    arguments = [sys.executable, "-m", "export", "interrupted:model", "--out", "served"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen(
        arguments,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    ) as process:
        wait_until((tmp_path / "comparing").exists, timeout=120)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in told
    assert not (tmp_path / "served").exists()
    assert not [each for each in (tmp_path / "temporary").iterdir() if "export" in each.name]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingToolError, match=r"needs onnxscript: pip install .*\[export\]"):
        require_libraries()


def folders(**options: bool) -> list[tuple[str, str, str]]:
    names = ("onnx", "tensorrt", "int8", "fp16", "bf16")
    every = {name: options.get(name, False) for name in names}
    return [(each.folder, each.runtime, each.precision) for each in plan("m", **every)]


def test_the_folders_of_the_options() -> None:
    assert folders() == [("m", "onnx", "fp32")]
    assert folders(int8=True) == [("m_int8", "onnx", "int8")]
    assert folders(onnx=True, fp16=True) == [("m", "onnx", "fp32"), ("m_fp16", "onnx", "fp16")]
    assert folders(tensorrt=True) == [("m", "tensorrt", "fp32")]
    assert folders(onnx=True, tensorrt=True, bf16=True) == [
        ("m", "onnx", "fp32"),
        ("m_tensorrt_bf16", "tensorrt", "bf16"),
    ]
    assert folders(tensorrt=True, fp16=True) == [("m_fp16", "tensorrt", "fp16")]
    for options in ({"bf16": True}, {"tensorrt": True, "fp16": True, "bf16": True}):
        with pytest.raises(RecipeError):
            folders(**options)


@pytest.mark.slow
def test_digits_read_held_out_digits(tmp_path: Path) -> None:
    result = command("digits", "--int8", "--onnx", "--out", str(tmp_path), folder=tmp_path)
    assert result.returncode == 0, result.stderr
    figure = re.search(r"accuracy on 360 held-out digits: (\d\.\d+)", result.stdout)
    assert figure is not None
    assert float(figure[1]) >= 0.98
    _, _, images, labels = load_digits()
    for name in ("digits", "digits_int8"):
        made = onnx_run(tmp_path / name / "1" / "model.onnx")({"image": images})
        assert (made["logits"].argmax(-1) == labels).mean() >= 0.97
        np.testing.assert_allclose(made["probabilities"].sum(-1), 1, atol=1e-5)

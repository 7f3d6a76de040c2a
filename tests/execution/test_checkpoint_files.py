"""Whatever is wrong with a checkpoint's files is said by file name and reason, before weights are
read."""

import json
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from jitney.engine.assemble import load_model
from jitney.errors import CheckpointError, ConfigError, UnsupportedModelError
from jitney.execution import eagle
from jitney.execution.checkpoint import (
    CONSOLIDATED,
    INDEX,
    WEIGHTS,
    check_checkpoint,
    resolve_model,
)
from jitney.read_config import make_config

from tests.tiny_models import make_checkpoint, make_head


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Several shards and an index."""
    path = make_checkpoint(tmp_path / "model", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) >= 3
    return path


def load(folder: Path):
    return load_model(make_config({"model": str(folder), "device": "cpu", "dtype": "float32"}))


def refusal(folder: Path) -> str:
    """The message of loading ``folder``; it never shows where the folder lies."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert str(folder.parent) not in str(caught.value)
    return str(caught.value)


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def test_sound_checkpoints_load(folder: Path, sharded: Path) -> None:
    assert check_checkpoint(folder).weights_dtype == "F32"
    assert load(sharded).num_parameters == load(folder).num_parameters


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder) == "config.json is missing"


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00\x01", '{"model_type": 3}', "{}"])
def test_malformed_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert refusal(folder).startswith("config.json ")


def test_config_that_contradicts_itself(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    assert "config.json cannot be used" in refusal(folder)


def test_malformed_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text("not JSON")
    assert refusal(folder).startswith("generation_config.json is not JSON")


def renamed(folder: Path, name: str) -> Path:
    (folder / WEIGHTS).rename(folder / name)
    return folder


@pytest.mark.parametrize("name", ["weights.safetensors", "model-00001-of-00001.safetensors"])
def test_one_file_of_any_name(folder: Path, name: str) -> None:
    """The weights are the same, and nothing is left in the folder."""
    before = load(folder).module.lm_head.weight
    files = {file.name for file in renamed(folder, name).iterdir()}
    assert torch.equal(load(folder).module.lm_head.weight, before)
    assert {file.name for file in folder.iterdir()} == files


def test_all_of_a_numbered_row_need_no_index(sharded: Path) -> None:
    before = load(sharded).module.lm_head.weight
    (sharded / INDEX).unlink()
    assert torch.equal(load(sharded).module.lm_head.weight, before)
    missing = shard(sharded)
    missing.unlink()
    assert refusal(sharded) == f"{missing.name} is missing, and so is {INDEX}"


def test_files_that_may_not_belong_together(folder: Path) -> None:
    renamed(folder, "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    message = refusal(folder)
    assert message.startswith(f"{INDEX} is missing, and which of these belong to the model")
    assert message.endswith("a.safetensors, b.safetensors")


def test_consolidated_weights(folder: Path) -> None:
    """With the names of transformers it is a file like any other, with Mistral's own it is not."""
    renamed(folder, CONSOLIDATED)
    assert load(folder).num_parameters > 0
    own_names = {"tok_embeddings.weight": torch.zeros(2, 2), "norm.weight": torch.zeros(2)}
    safetensors.torch.save_file(own_names, folder / CONSOLIDATED)
    message = refusal(folder)
    assert message.startswith(f"{CONSOLIDATED} is in Mistral's own layout")
    assert "`hf download NAME --exclude 'consolidated.safetensors'`" in message
    assert "`python convert_mistral_weights_to_hf.py --input_dir" in message
    (folder / "config.json").rename(folder / "params.json")
    assert refusal(folder) == message


def test_an_adapter_is_no_model(folder: Path) -> None:
    message = refusal(renamed(folder, "adapter_model.safetensors"))
    assert message.startswith("adapter_model.safetensors is an adapter")


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert refusal(folder) == f"{WEIGHTS} is missing, and so is {INDEX}"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pkl", "consolidated.00.pth"])
def test_pickles_are_not_read(folder: Path, name: str) -> None:
    torch.save({}, folder / name)
    (folder / WEIGHTS).unlink()
    message = refusal(folder)
    assert message.startswith(f"{name} is a pickle")
    assert "only safetensors are read" in message
    assert "M.from_pretrained('FOLDER').save_pretrained('NEW')" in message


def test_pickle_named_by_the_index(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "pytorch_model.bin"
    (sharded / INDEX).write_text(json.dumps(index))
    assert "pytorch_model.bin, but only safetensors are read" in refusal(sharded)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -5000])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    assert refusal(folder).startswith(f"{WEIGHTS} is ")


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 9) + b'{"a": 1} ',
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"{}",
    ],
)
def test_not_safetensors(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    assert refusal(folder).startswith(f"{WEIGHTS} ")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]},
        {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0]},
    ],
)
def test_header_that_does_not_add_up(folder: Path, entry: dict) -> None:
    header = json.dumps({"a": entry}).encode()
    (folder / WEIGHTS).write_bytes(
        struct.pack("<Q", len(header)) + header + bytes(entry["data_offsets"][-1])
    )
    assert refusal(folder).startswith(f"{WEIGHTS} is truncated, corrupt or not")


def test_missing_shard(sharded: Path) -> None:
    name = shard(sharded).name
    shard(sharded).unlink()
    assert refusal(sharded) == f"{name} is missing, but {INDEX} names it"


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}'])
def test_malformed_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert refusal(sharded).startswith(INDEX)


def test_tensor_missing_from_the_weights(folder: Path) -> None:
    """transformers alone would draw it at random and serve nonsense."""
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert refusal(folder) == f"{WEIGHTS} lacks model.layers.1.mlp.up_proj.weight"


def test_tensor_of_another_shape(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] = torch.ones(32)
    safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert WEIGHTS in refusal(folder)


def test_weights_that_are_not_numbers(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][3] = float("nan")
    safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert "not finite" in refusal(folder)


def test_weights_in_eight_bits(folder: Path) -> None:
    safetensors.torch.save_file({"a": torch.zeros(4, dtype=torch.uint8)}, folder / WEIGHTS)
    with pytest.raises(UnsupportedModelError, match="U8"):
        load(folder)


@pytest.mark.parametrize("name", ["no/such-model", "nowhere", "../up", "a b/c:d", "/no/such/place"])
def test_neither_folder_nor_cached(name: str) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor in the local hub cache") as raised:
        resolve_model(name)
    assert repr(name) in str(raised.value)


def test_a_broken_head(folder: Path, tmp_path: Path) -> None:
    head = Path(make_head(tmp_path / "head", folder))
    path = head / "hidden.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    speculation = {"drafter": "eagle", "model": str(head)}
    config = make_config({"model": str(folder), "speculation": speculation})
    model = load(folder)
    with pytest.raises(
        CheckpointError, match=r"hidden.safetensors is truncated, corrupt"
    ) as caught:
        eagle.read_weight(config, target=model, head=model)
    assert str(tmp_path) not in str(caught.value)

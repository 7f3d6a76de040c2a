"""What is no adapter of the model is refused by name: the field or tensor, the value, the bound."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from jitney.adapters import peft_files
from jitney.adapters.peft_files import CONFIG, WEIGHTS, read_adapter
from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError
from jitney.execution.low_rank import Site
from safetensors.torch import save_file

SITES = {f"model.layers.0.self_attn.{n}_proj": Site(8, 6 if n == "q" else 4) for n in "qkv"}
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
LAYERS = "|".join(map(str, range(80)))
GOOD = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "bias": "none", "use_dora": False}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({**GOOD, **config}), encoding="utf-8")
    pair = {f"{QUERY}.lora_A.weight": torch.ones(2, 8), f"{QUERY}.lora_B.weight": torch.ones(6, 2)}
    made = {**pair, **tensors}
    save_file({name: each for name, each in made.items() if each.numel()}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 1.5),
        ({"r": 2.0}, 1.5),
        ({"use_rslora": True}, 3 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 8}}, 4.0),
        ({"alpha_pattern": {"k_proj": 8, r"layers\.\d\.self_attn\.q_proj": 6}}, 3.0),
        ({"r": 9, "rank_pattern": {"q_proj": 2}}, 1.5),
        ({"r": 9, "rank_pattern": {r".*layers\.(0|1|2)\..*_attn.*(q|v)_proj": 2}}, 1.5),
        ({"r": 9, "rank_pattern": {rf".*layers\.({LAYERS})\..*_attn.*(?:q|v)_proj": 2}}, 1.5),
    ],
)
def test_factors_carry_the_scale(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    _, factors = read_adapter(write(tmp_path / "a", config, {}), SITES, 8)
    (pair,) = factors.values()
    assert torch.equal(pair.a, torch.ones(2, 8))
    assert torch.allclose(pair.b, torch.full((2, 6), scale))


def test_each_pattern_is_compiled_once_for_the_header_and_once_for_the_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an adapter that has a pattern for each of many layers takes minutes to load."""
    patterns = [f"layer_{number}" for number in range(600)]  # ``re`` keeps 512
    compiled: list[str] = []
    compile_pattern = re._compiler.compile  # type: ignore[attr-defined]

    def note(pattern: str, flags: int) -> object:
        compiled.extend(name for name in patterns if f"({name})" in pattern)
        return compile_pattern(pattern, flags)

    monkeypatch.setattr(re._compiler, "compile", note)  # type: ignore[attr-defined]
    key = QUERY.replace("q_proj", "k_proj")
    second = {f"{key}.lora_A.weight": torch.ones(2, 8), f"{key}.lora_B.weight": torch.ones(4, 2)}
    config = {"rank_pattern": dict.fromkeys(patterns, 2)}
    read_adapter(write(tmp_path / "a", config, second), SITES, 8)
    assert len(compiled) == 2 * len(patterns)


def test_the_version_tells_files_apart(tmp_path: Path) -> None:
    first, _ = read_adapter(write(tmp_path / "a", {}, {}), SITES, 8)
    again, _ = read_adapter(write(tmp_path / "b", {}, {}), SITES, 8)
    scaled, _ = read_adapter(write(tmp_path / "a", {"lora_alpha": 4}, {}), SITES, 8)
    other = {f"{QUERY}.lora_A.weight": torch.zeros(2, 8)}
    changed, _ = read_adapter(write(tmp_path / "a", {}, other), SITES, 8)
    assert first == again
    assert len({first, scaled, changed}) == 3


def test_sum_and_factors_are_of_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "a", {}, {})
    before, _ = read_adapter(folder, SITES, 8)
    reads = list[str]()
    read = peft_files._read

    def replaced(folder: Path, name: str, most: int) -> bytes:
        """Once the second file is read, both are written anew."""
        data = read(folder, name, most)
        reads.append(name)
        if len(reads) == 2:
            zeros = {f"{QUERY}.lora_A.weight": torch.zeros(2, 8)}
            write(folder, {"lora_alpha": 4}, zeros)
        return data

    monkeypatch.setattr(peft_files, "_read", replaced)
    version, factors = read_adapter(folder, SITES, 8)
    (pair,) = factors.values()
    assert version == before
    assert torch.equal(pair.a, torch.ones(2, 8))
    assert torch.equal(pair.b, torch.full((2, 6), 1.5))
    assert reads == [CONFIG, WEIGHTS]


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_pipe_is_refused_and_holds_up_nobody(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "a", {}, {})
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(InvalidArgumentError, match=f"{name} is no regular file"):
        read_adapter(folder, SITES, 8)


def test_weights_are_judged_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terabyte, as its header says, of which the disk holds nothing."""
    folder = write(tmp_path / "a", {}, {})
    size = 1 << 40
    tensor = {"dtype": "F32", "shape": [1 << 19, 1 << 19], "data_offsets": [0, size]}
    header = json.dumps({f"{QUERY}.lora_A.weight": tensor}).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    reads: list[str] = []
    read = peft_files._read

    def note(folder: Path, name: str, most: int) -> bytes:
        reads.append(name)
        return read(folder, name, most)

    monkeypatch.setattr(peft_files, "_read", note)
    with pytest.raises(InvalidArgumentError, match=r"the shape of .* is \(524288, 524288\)"):
        read_adapter(folder, SITES, 8)
    assert reads == [CONFIG]


@pytest.mark.parametrize("what", ["longer", "gap", "not UTF-8", "nested", "no object", "no length"])
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path: Path, what: str) -> None:
    """Before the file is read."""
    folder = write(tmp_path / "a", {}, {})
    path = folder / WEIGHTS
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    made = data[8 : 8 + length]
    if what == "gap":
        name = next(name for name in header if name != "__metadata__")
        header[name]["data_offsets"] = [0, 1 << 30]
        made = json.dumps(header).encode()
    made = {
        "not UTF-8": b"\xff\xfe{}",
        "nested": b"[" * 100_000,
        "no object": b"[]",
    }.get(what, made)
    path.write_bytes(len(made).to_bytes(8, "little") + made + data[8 + length :])
    if what == "longer":
        with path.open("r+b") as file:
            file.truncate(1 << 40)
    if what == "no length":
        path.write_bytes(b"\x01")
    with pytest.raises(InvalidArgumentError):
        read_adapter(folder, SITES, 8)


def test_a_tensor_of_many_dimensions_is_refused_before_they_are_multiplied(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {}, {})
    tensor = {"dtype": "F32", "shape": [2**62] * 9, "data_offsets": [0, 0]}
    header = json.dumps({f"{QUERY}.lora_A.weight": tensor}).encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidArgumentError, match=r"header of .* is broken: .* of length <= 8"):
        read_adapter(folder, SITES, 8)


def test_a_configuration_without_end_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {}, {})
    with (folder / CONFIG).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidArgumentError, match=r"at most 1,048,576 bytes"):
        read_adapter(folder, SITES, 8)


def test_factors_stay_when_a_file_is_written_in_place(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {}, {})
    _, factors = read_adapter(folder, SITES, 8)
    with (folder / WEIGHTS).open("r+b") as file:
        file.write(bytes((folder / WEIGHTS).stat().st_size))
    (pair,) = factors.values()
    assert torch.equal(pair.a, torch.ones(2, 8))


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ({"use_dora": True}, {}, "use_dora is True, but must be False"),
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3', but must be 'LORA'"),
        ({"bias": "all"}, {}, "bias is 'all', but must be 'none'"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save is ['lm_head'], but must be None"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights is 'pissa'"),
        ({"r": 0}, {}, "r is 0, but must be a whole number above 0"),
        ({"r": 2.5}, {}, "r is 2.5, but must be a whole number above 0"),
        ({"r": True}, {}, "r is True, but must be a whole number above 0"),
        ({"r": 10**400}, {}, "0…, but must be a whole number above 0 and at most 1e+308"),
        ({"lora_alpha": "x"}, {}, "lora_alpha is 'x', but must be a number above 0"),
        ({"lora_alpha": 10**400}, {}, "0…, but must be a number above 0 and at most 1e+308"),
        (
            {"lora_alpha": 1e300},
            {},
            "lora_alpha of model.layers.0.self_attn.q_proj is 1e+300, but must be so small that",
        ),
        ({"rank_pattern": {"q_proj": -1}}, {}, "rank_pattern is {'q_proj': -1}"),
        ({"rank_pattern": {"q_proj": 2.5}}, {}, "rank_pattern is {'q_proj': 2.5}"),
        ({"rank_pattern": {"q_proj": 10**400}}, {}, "but must be an object, each value a whole"),
        ({"alpha_pattern": {"q_proj": 10**400}}, {}, "but must be an object, each value a numb"),
        ({"alpha_pattern": {"(": 1}}, {}, "a regular expression"),
        ({"rank_pattern": {r"(\w+)+!": 2}}, {}, "no repeated group"),
        ({"rank_pattern": {r"(?x:(?:\w+) +)!": 2}}, {}, "no flags"),
        ({"rank_pattern": {"x{99999999999}": 2}}, {}, "a regular expression"),
        ({"rank_pattern": {"(" * 9999: 2}}, {}, "no repeated group"),
        ({"rank_pattern": {".?" * 40 + "!": 2}}, {}, "fewer repetitions"),
        ({"rank_pattern": {"(.|m)" * 40 + "!": 2}}, {}, "and alternatives"),
        (
            {"alpha_pattern": {f".*.*.*{number}": 2 for number in range(30_000)}},
            {},
            "alpha_pattern has patterns that take too long",
        ),
        ({"alpha_pattern": {"a{9999999999}": 1}}, {}, "a regular expression"),
        ({"r": 9}, {}, "r of model.layers.0.self_attn.q_proj is 9, but must be from 1 to 8"),
        ({"r": 3}, {}, "q_proj.lora_A.weight is (2, 8), but must be (3, 8)"),
        ({}, {f"{QUERY}.lora_B.weight": torch.ones(5, 2)}, "is (5, 2), but must be (6, 2)"),
        (
            {},
            {f"{QUERY}.lora_B.weight": torch.ones(0)},
            "lora_B.weight is None, but must be (6, 2)",
        ),
        ({}, {f"{QUERY}.lora_A.weight": torch.full((2, 8), torch.nan)}, "must hold finite numbers"),
        ({}, {f"{QUERY}.lora_A.weight": torch.ones(2, 8, dtype=torch.int8)}, "floating point"),
        ({}, {f"{QUERY}.lora_magnitude_vector": torch.ones(6)}, "lora_A and lora_B alone"),
        ({}, {f"{QUERY}.lora_B.bias": torch.ones(6)}, "is of another kind"),
        ({}, {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 8)}, "'lm_head' cannot have"),
        (
            {},
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 8)},
            "lora_embedding_A' is of another kind",
        ),
        ({}, {"base_model.model.model.norm.lora_A.weight": torch.ones(2, 8)}, "k_proj, q_proj, v_"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], says: str
) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        read_adapter(write(tmp_path / "a", config, tensors), SITES, 8)
    assert says in str(error.value)
    assert str(tmp_path) not in str(error.value)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {}, {})
    whole = (folder / WEIGHTS).read_bytes()
    for content, says in ((whole[:-5], "the size of"), (None, f"{WEIGHTS} is missing")):
        (folder / WEIGHTS).unlink()
        if content is not None:
            (folder / WEIGHTS).write_bytes(content)
        with pytest.raises(InvalidArgumentError, match=says):
            read_adapter(folder, SITES, 8)
    (folder / CONFIG).write_text("{", encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="is not JSON"):
        read_adapter(folder, SITES, 8)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EIO, UnavailableError),
        (errno.EMFILE, UnavailableError),
        (errno.ESTALE, UnavailableError),
        (errno.EACCES, InvalidArgumentError),
    ],
)
def test_a_passing_fault_of_the_file_system_is_not_the_request_s(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    expected: type[JitneyError],
) -> None:
    folder = write(tmp_path / "a", {}, {})

    def fail(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    for name in ("open", "stat"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, fail)
            with pytest.raises(expected, match=os.strerror(number)):
                read_adapter(folder, SITES, 8)

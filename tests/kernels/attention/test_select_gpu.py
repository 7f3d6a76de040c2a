"""The choice of the GPU's attention function, its tile table and its plans. Nothing is run."""

import logging
import sys

import pytest
import torch

pytest.importorskip("triton")
from jitney.errors import ConfigError
from jitney.kernels.gpu.gpu_attention import GpuAttention
from jitney.kernels.gpu.language import INTERPRETED
from jitney.kernels.gpu.tiles import look_up, why_not
from triton import knobs

from tests.kernels.attention.choose import choose

CUDA = torch.device("cuda")
CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture
def capability(monkeypatch):
    """A device of a compute capability that a test sets, with 100 processors."""
    have = {"is": (9, 0)}
    properties = type("Properties", (), {"multi_processor_count": 100})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: have["is"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return have


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
def test_on_a_cpu_only_interpreted(monkeypatch):
    assert choose("gpu", CPU, torch.float32, 64, 4, 2).name == "gpu"
    monkeypatch.setattr(knobs, "propagate_env", False)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ConfigError, match=r"'gpu', but .* need a CUDA device, not cpu"):
        choose("gpu", CPU, torch.float32, 64, 4, 2)


def test_on_a_device(capability, caplog):
    assert choose("auto", CUDA, BF16, 128, 32, 8).name == "gpu"
    invariant = choose("auto", CUDA, BF16, 128, 32, 8, batch_invariant=True)
    assert isinstance(invariant, GpuAttention)
    assert invariant.batch_invariant
    with caplog.at_level(logging.WARNING):
        assert choose("auto", CUDA, BF16, 100, 32, 8).name == "reference"
    assert "head sizes from 16 to 256 in steps of 8, not 100" in caplog.text
    with pytest.raises(ConfigError, match=r"batch_invariant needs .* not 100"):
        choose("auto", CUDA, BF16, 100, 32, 8, batch_invariant=True)
    with pytest.raises(ConfigError, match=r"batch_invariant needs .* is 'reference'"):
        choose("reference", CPU, torch.float32, 64, 4, 2, batch_invariant=True)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        ((torch.float64, 64, 4, 2), "not float64"),
        ((BF16, 512, 4, 2), "not 512"),
        ((BF16, 8, 4, 2), "not 8"),
        ((BF16, 64, 6, 4), "not 6 for 4"),
        ((BF16, 64, 256, 1), "up to 128 query heads for each KV head, not 256 for 1"),
    ],
)
def test_reasons(layer, text):
    assert text in why_not(CPU, *layer)


def test_old_devices_are_refused(capability):
    capability["is"] = (7, 5)
    assert "8.0, but cuda has 7.5" in why_not(CUDA, BF16, 64, 4, 2)
    capability["is"] = (8, 0)
    assert why_not(CUDA, BF16, 64, 4, 2) is None
    assert "8.9, but cuda has 8.0" in why_not(CUDA, torch.float8_e4m3fn, 64, 4, 2)


def test_without_the_language(monkeypatch, caplog):
    for name in [m for m in sys.modules if m.split(".")[0] == "triton"]:
        monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level(logging.WARNING):
        assert choose("auto", CUDA, BF16, 128, 32, 8).name == "reference"
    assert ".[gpu]" in caplog.text


@pytest.mark.parametrize("group", [1, 4, 7, 71, 128])
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("capability_of", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_the_table_fits_every_group(capability_of, dtype, group):
    for head_size in (16, 64, 80, 128, 256):
        for invariant in (False, True):
            table = look_up(capability_of, 132, dtype, head_size, group, invariant)
            assert table.decodes.decode_rows >= group
            for tiles in table:
                assert tiles.decode_rows >= group
                assert min(tiles.block_n, tiles.decode_rows) >= 16  # of a matrix product
            assert table.mixed.chunk_rows >= group
            if invariant:
                assert table.decodes == table.mixed
                assert table.mixed.decode_rows == table.mixed.chunk_rows


def test_plans(capability):
    attend = GpuAttention(CUDA, BF16, 128, 32, 8)

    def parts(rows: int, context: int) -> int:
        plan = attend.plan(rows, rows, 1, context)
        assert plan.only_decodes
        assert hash(plan) == hash(attend.plan(rows, rows, 1, context))
        return plan.parts

    # 200 programs fill 100 processors; 8 KV heads make 8 for a row.
    assert parts(1, 32768) == 25
    assert parts(1, 1000) == 4  # no part below 256 keys
    assert parts(1, 100) == 1
    assert parts(10, 32768) == 2
    assert parts(64, 32768) == 1
    assert not attend.plan(2, 3, 2, 50).only_decodes
    assert not attend.plan(2, 1, 1, 50).only_decodes  # a row without tokens


def test_an_invariant_plan_depends_on_nothing(capability):
    attend = GpuAttention(CUDA, BF16, 128, 32, 8, batch_invariant=True)
    steps = [(1, 1, 1, 5000), (64, 64, 1, 131072), (3, 70, 60, 60)]
    (plan,) = {attend.plan(*step) for step in steps}
    assert plan.parts == 1

"""Options and memory of the GPU's runner while it loads, its kernels interpreted."""

import dataclasses
from pathlib import Path

import pytest
import torch
from jitney.batch import Batch
from jitney.engine.assemble import load_model, load_runner
from jitney.errors import ConfigError
from jitney.execution import load
from jitney.execution import runner as runner_module
from jitney.execution.interface import KvScales
from jitney.execution.low_rank import find_sites
from jitney.execution.memory import make_layer_caches
from jitney.messages import Tokens
from msgspec.structs import replace

from tests.execution.drive import drive
from tests.kernels.attention.choose import for_layers
from tests.kernels.gpu.small_gpu import GREEDY, options
from tests.tiny_models import make_checkpoint

pytest.importorskip("triton")
from jitney.kernels.gpu import gpu_accelerator as load_module
from jitney.kernels.gpu import measure as measure_module
from jitney.kernels.gpu.invariant_product import InvariantLinear

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted on a CPU")


@pytest.mark.slow  # a step over such a cache: test_gpu_interpreted.py
def test_eight_bit_cache(path: Path, plain) -> None:
    """Scales are found while loading; over a context of many blocks the logits stay close."""
    runner = load_runner(options(path, kv_cache_dtype="float8_e4m3"))
    cache = runner._caches[0]
    assert cache.keys.dtype == torch.float8_e4m3fn
    assert cache.key_scale.shape == cache.value_scale.shape == (1,)
    stored = cache.keys.float().abs().max() * cache.key_scale
    assert 0 < float(stored) <= 448 * float(cache.key_scale)
    assert runner.info.num_blocks == 4 * plain.info.num_blocks
    params = replace(GREEDY, max_tokens=1, logprobs=10)
    requests = [(list(range(20, 50)), params), ([9, 8, 7], params)]
    for mine, right in zip(
        *(
            [e.logprobs[0] for e in drive(each, requests).events if isinstance(e, Tokens)]
            for each in (runner, plain)
        ),
        strict=True,
    ):
        known = {each.token_id: each.logprob for each in mine}
        for each in right[:4]:
            assert known[each.token_id] == pytest.approx(each.logprob, abs=0.3)
    runner.close()


@pytest.mark.slow
def test_the_eight_bit_cache_of_a_draft_model_has_scales_too(path: Path) -> None:
    """The model is its own draft model, so both have the same."""
    speculation = {"drafter": "draft_model", "model": str(path)}
    runner = load_runner(options(path, kv_cache_dtype="float8_e4m3", speculation=speculation))
    (cache,), (of_draft,) = runner._caches, runner._draft._caches
    assert of_draft.keys.dtype == torch.float8_e4m3fn
    assert torch.equal(of_draft.key_scale, cache.key_scale)
    assert torch.equal(of_draft.value_scale, cache.value_scale)
    runner.close()


def test_a_draft_model_that_no_kernel_fits_refuses_what_needs_them(path: Path, tmp_path) -> None:
    """Its cache would be of float8 and without scales. (The model itself has kernels.)"""
    draft = make_checkpoint(tmp_path, "llama", num_hidden_layers=1, head_dim=8)
    speculation = {"drafter": "draft_model", "model": str(draft)}
    config = options(path, attention="auto", kv_cache_dtype="float8_e4m3", speculation=speculation)
    kernels = load_module.GpuAccelerator(config, torch.device("cpu"))
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'float8_e4m3'"):
        load.load_runner(config, kernels)


def test_scales_of_the_checkpoint_are_taken(path: Path, monkeypatch) -> None:
    stated = KvScales(key=torch.tensor([0.25]), value=torch.tensor([0.5]))
    monkeypatch.setattr("jitney.execution.read_model.cache_scales", lambda *_: {0: stated})
    runner = load_runner(options(path, kv_cache_dtype="float8_e4m3"))
    assert (runner._caches[0].key_scale, runner._caches[0].value_scale) == stated
    runner.close()


@pytest.mark.slow
def test_compiled(path: Path, plain, monkeypatch) -> None:
    """The compiler takes the modules apart without looking into the attention, for prompts and
    decodes of any number of tokens. (Its back end, which makes kernels, is left out here.)"""

    def compile_plainly(self, model, rows):
        load_module.compile_module(model.module, backend="eager")
        return model

    monkeypatch.setattr(load_module.GpuAccelerator, "speed_up", compile_plainly)
    runner = load_runner(options(path))
    counts = torch._dynamo.utils.counters["stats"]
    params = replace(GREEDY, max_tokens=3)
    drive(runner, [([5, 6, 7, 8], params), ([9], params)])
    graphs = counts["unique_graphs"]
    assert graphs > 0
    requests = [([5, 6, 7, 8, 9, 10], params), ([9, 8], params)]
    assert drive(runner, requests).outputs == drive(plain, requests).outputs
    assert counts["unique_graphs"] == graphs
    runner.close()
    torch._dynamo.reset()


def test_batch_invariant(path: Path, plain) -> None:
    """No product is torch's any more, and the tokens are the same."""
    runner = load_runner(options(path, batch_invariant=True))
    (attention,) = {cache.attend for cache in runner._caches}
    assert attention.batch_invariant
    modules = [type(each) for each in runner._model.module.modules()]
    assert torch.nn.Linear not in modules
    assert InvariantLinear in modules
    requests = [([5, 6, 7, 8], replace(GREEDY, max_tokens=2))]
    assert drive(runner, requests).outputs == drive(plain, requests).outputs
    runner.close()


def test_without_overlap(path: Path) -> None:
    runner = load_runner(options(path, overlap=False))
    assert not runner.info.overlap
    runner.close()


@pytest.mark.parametrize(
    ("attention", "given", "message"),
    [
        ("reference", {"batch_invariant": True}, "batch_invariant"),
        ("reference", {"kv_cache_dtype": "float8_e4m3"}, "kv_cache_dtype is 'float8_e4m3'"),
        ("gpu", {"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8'.* float8_e4m3 or auto"),
        ("gpu", {"batch_invariant": True, "adapters": "any"}, "adapters is 'any'.* left out with"),
        *(
            (attention, {**given, "device": "auto"}, message)
            for attention in ("reference", "gpu")
            for given, message in (
                ({"compile": True}, "compile is True"),
                ({"cuda_graphs": "load"}, "cuda_graphs is 'load'"),
                ({"cuda_graph_sizes": [2]}, "cuda_graph_sizes is"),
            )
        ),
    ],
)
def test_options_that_have_no_meaning_here(
    path: Path, attention: str, given: dict, message: str
) -> None:
    """No option stays without effect: a CPU, interpreting or not, has neither graphs nor a
    compiler; plain attention has neither 8 bits nor fixed tiles."""
    with pytest.raises(ConfigError, match=message):
        load_runner(options(path, attention=attention, **given))


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
def test_the_largest_steps_are_measured(path: Path, monkeypatch, adapted: bool) -> None:
    """What a GPU measures while loading runs over a cache of one block, whatever the lengths; a
    GPU's counters are stood in for."""
    config = options(path, max_num_seqs=2, max_num_batched_tokens=12, cuda_graph_sizes=None)
    runner = load_runner(config)
    info = replace(runner.info, num_blocks=1, max_model_len=9)
    monkeypatch.setattr(measure_module, "_SHORT_CONTEXT", 3)
    peaks = iter([1000, 5000])
    counters = {
        "empty_cache": lambda: None,
        "memory_allocated": lambda device: 200,
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_reserved": lambda device: next(peaks),
    }
    for name, stand_in in counters.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    seen: list[Batch] = []
    real = runner_module.TorchRunner.launch

    def spy(self, batch: Batch):
        seen.append(batch)
        return real(self, batch)

    monkeypatch.setattr(runner_module.TorchRunner, "launch", spy)
    model = load_model(config)
    if adapted:
        model = dataclasses.replace(model, sites=find_sites(model.module))
    attention = for_layers("gpu", model.layers, model.dtype, model.device)
    caches = make_layer_caches(model.layers, attention, 4, model.dtype, model.device, 1)
    found = measure_module.measure_steps(model, caches, info, config)
    assert found.activations == 5000 - 200
    assert found.graphs == 2 * (1000 - 200) + 2 * measure_module._GRAPH_BYTES
    assert max(batch.num_tokens for batch in seen) == 12
    assert max(row.end for batch in seen for row in batch.rows) == 9
    assert {len(batch.rows) for batch in seen} == {2}
    largest = [row.adapter for batch in seen[1:] for row in batch.rows]
    assert {each is not None for each in largest} == {adapted}
    runner.close()

"""The runner on a GPU: graphs against kernel by kernel, overlap against waiting, memory, no waits.

Run on a machine with an NVIDIA GPU and a CUDA build of torch: ``pytest tests/gpu -m gpu``.
"""

import gc
import logging
from pathlib import Path

import pytest
import torch
from jitney.batch import Batch, Row
from jitney.config import EngineConfig
from jitney.engine.assemble import load_runner
from jitney.messages import Tokens
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from msgspec.structs import replace

from tests.execution.drive import drive
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=24, ignore_eos=True)


def options(path: Path, **more: object) -> EngineConfig:
    given = {
        "model": str(path),
        "device": "cuda",
        "dtype": "float32",
        "attention": "gpu",
        "block_size": 16,
        "kv_cache_bytes": 64 << 20,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
    }
    return make_config({**given, **more})


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("gpu"), "llama", max_position_embeddings=8192, head_dim=64
    )


def requests(count: int = 9) -> list[tuple[list[int], SamplingParams]]:
    """Some greedy, some drawn, of different lengths."""
    kinds = [GREEDY, SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=17)]
    return [
        ([(17 * i + j) % VOCAB_SIZE for j in range(2 + 5 * i)], kinds[i % 2]) for i in range(count)
    ]


def row(key: int, tokens: list[int], start: int, table: list[int], carried: int | None) -> Row:
    return Row(
        key=key, index=0, token_ids=tokens, start=start, block_table=table, sample=(0,),
        params=GREEDY, prompt=[5] * 20, output=[], stop_ids=frozenset(), bad_words_ids=[],
        carried=carried,
    )  # fmt: skip


@pytest.mark.parametrize("graphs", ["lazy", "load"])
def test_graphs_give_what_kernels_give(path: Path, graphs: str) -> None:
    outputs = []
    for mode in ("never", graphs):
        runner = load_runner(options(path, cuda_graphs=mode))
        outputs.append(drive(runner, requests(), stagger=2).outputs)
        assert (len(runner._run_tokens.graphs) > 0) == (mode != "never")
        runner.close()
    assert outputs[0] == outputs[1]


def test_the_logits_of_a_graph_are_those_of_its_kernels(path: Path) -> None:
    """Bitwise: a graph launches the same kernels, padded; padding is seen by no other row."""
    logprobs = []
    for mode in ("never", "lazy"):
        runner = load_runner(options(path, cuda_graphs=mode, cuda_graph_sizes=None))
        params = replace(GREEDY, logprobs=5, max_tokens=12)
        driven = drive(runner, [([5 + i] * 9, params) for i in range(4)])  # 4 rows: no padding
        logprobs.append([e.logprobs for e in driven.events if isinstance(e, Tokens)])
        runner.close()
    assert logprobs[0] == logprobs[1]


def test_a_decode_step_waits_for_nothing(path: Path) -> None:
    """Two steps ahead of the device, with tokens carried on it."""
    runner = load_runner(options(path))
    tables = [[2 * r, 2 * r + 1] for r in range(5)]
    prompts = [row(r, [5] * 10, 0, tables[r], None) for r in range(5)]
    runner.execute(Batch(prompts))
    for start in (10, 11):  # captures
        runner.execute(Batch([row(r, [7], start, tables[r], None) for r in range(5)]))
    before = runner.launch(Batch([row(r, [7], 12, tables[r], None) for r in range(5)]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for start in (13, 14, 15, 16, 17):
            after = runner.launch(Batch([row(r, [0], start, tables[r], r) for r in range(5)]))
            before, last = after, before
            assert len(last.wait().rows) == 5
    finally:
        torch.cuda.set_sync_debug_mode("default")
    before.wait()
    runner.close()


def test_memory_comes_back(path: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        runner = load_runner(options(path))
        drive(runner, requests(3))
        runner.close()
        del runner
        gc.collect()
        torch.cuda.empty_cache()
    # Libraries keep workspaces, once.
    assert torch.cuda.memory_allocated() - before < 64 << 20


def test_a_step_fits_into_what_the_ledger_set_aside(path: Path, caplog) -> None:
    """The largest step needs no more beside weights and cache than was measured."""
    with caplog.at_level(logging.INFO, logger="jitney"):
        runner = load_runner(options(path))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    params = replace(GREEDY, prompt_logprobs=1, max_tokens=2)
    drive(runner, [([7] * 255, params)], budget=256)
    grown = torch.cuda.max_memory_reserved() - before
    (ledger,) = (r.message for r in caplog.records if r.message.startswith("memory: "))
    stated = int(ledger.split("activations at most about ")[1].split(" MiB")[0].replace(",", ""))
    assert grown <= (stated + 1) << 20
    runner.close()


def test_others_of_the_process_capture_graphs_meanwhile(path: Path) -> None:
    """Outside of inference mode, as transformers does: torch keeps one state for all graphs."""
    runner = load_runner(options(path))
    drive(runner, requests(3))
    assert len(runner._run_tokens.graphs) > 0
    x = torch.ones(8, device="cuda")
    y = x + 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(x + 1)
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [5.0] * 8
    runner.close()

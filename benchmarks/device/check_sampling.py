"""Part ``check-sampling``: the device's sampler draws what the CPU's draws from the same logits."""

from functools import partial

import torch
from jitney.execution.gpu.sampler import DeviceSampler
from jitney.execution.sampler import Sampled, sample
from jitney.request import Row
from jitney.sampling_params import SamplingParams

from benchmarks.device.environment import device_of
from benchmarks.device.supervise import Bench

PARAMS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "all three": {"temperature": 1.3, "top_k": 100, "top_p": 0.8, "min_p": 0.01},
    "top_k 1": {"top_k": 1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {7: 4.0, 11: -50.0}},
    "allowed": {"allowed_token_ids": (3, 5, 8, 13)},
    "min_tokens": {"min_tokens": 50},
    "logprobs": {"logprobs": 5},
}
_OUTPUT = [5, 8, 8, 13, 5]


def run(bench: Bench) -> None:
    """Each kind of parameters, then all of them in one batch; 16- and 32-bit logits."""
    device = device_of(bench)
    dtypes = (torch.float32,) if bench.tiny else (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for name, fields in PARAMS.items():
            label = f"{name}, {kind}"
            bench.case(label, partial(_agree, bench, label, [fields] * 4, dtype, device), 1)
        label = f"all in one batch, {kind}"
        everyone = [*PARAMS.values()] * (1 if bench.tiny else 4)
        bench.case(label, partial(_agree, bench, label, everyone, dtype, device), 1)
    bench.case("not finite", partial(_not_finite, bench, device), 1)


def _agree(
    bench: Bench, name: str, kinds: list[dict[str, object]], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    vocab = 500 if bench.tiny else 128_256
    generator = torch.Generator().manual_seed(len(name))
    logits = (torch.randn(len(kinds), vocab, generator=generator) * 4).to(dtype)
    pairs = [(_row(seed, fields), 0) for seed, fields in enumerate(kinds)]
    right = sample(logits, pairs)
    sampler = DeviceSampler(device, vocab)
    launched = sampler.launch(logits.to(device), pairs)
    ids = launched.token_ids.tolist()
    got = launched.wait()
    wrong = sum(
        a.token_id != b.token_id or b.token_id != each or not _same_logprobs(a, b)
        for a, b, each in zip(right, got, ids, strict=True)
    )
    bench.add(name, value=wrong, unit=f"of {len(kinds)}", ratio=wrong, bar=0, at_most=True)


def _same_logprobs(a: Sampled, b: Sampled) -> bool:
    if a.logprobs is None or b.logprobs is None:
        return a.logprobs is b.logprobs
    return [each.token_id for each in a.logprobs] == [each.token_id for each in b.logprobs] and all(
        abs(x.logprob - y.logprob) < 1e-4 and x.rank == y.rank
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    )


def _not_finite(bench: Bench, device: torch.device) -> None:
    """A row of NaN is an error of that row, its token 0; its neighbours are served."""
    logits = torch.randn(3, 500).to(device)
    logits[1] = float("nan")
    pairs = [(_row(seed, {"temperature": 0.0}), 0) for seed in range(3)]
    launched = DeviceSampler(device, 500).launch(logits, pairs)
    results = launched.wait()
    wrong = [each.error is not None for each in results] != [False, True, False]
    wrong |= launched.token_ids[1].item() != 0
    bench.add("not finite", value=float(wrong), ratio=float(wrong), bar=0, at_most=True)


def _row(seed: int, fields: dict[str, object]) -> Row:
    params = SamplingParams(**{"seed": 1000 + seed, "max_tokens": 99, **fields})  # type: ignore[arg-type]
    prompt = [1, 2, 3, 7, 11]
    return Row(
        key=seed, index=0, token_ids=[_OUTPUT[-1]], start=len(prompt) + len(_OUTPUT) - 1,
        block_table=[0], sample=(0,), params=params, prompt=prompt, output=list(_OUTPUT),
        stop_ids=frozenset({2}), bad_words_ids=[],
    )  # fmt: skip

"""``jitney plan``: what is expected is what the real scheduler does, and lengths are read right."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from jitney import cli
from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError, JitneyError
from jitney.messages import Footprint
from jitney.read_config import make_config
from jitney_measure import lengths, planning, record, sizing
from jitney_measure.lengths import Lengths
from jitney_measure.plan_command import read_bytes
from jitney_measure.simulation import simulate
from jitney_measure.sizing import EngineLimits, expect
from msgspec.structs import replace
from typer.testing import CliRunner

from tests.measure.trials import point
from tests.tiny_models import make_checkpoint

# Prompts and outputs, as on the command line.
DISTRIBUTIONS = {
    "narrow": ("900:400", "250:150"),
    "wide": ("500:1000", "200:300"),
    "fixed": ("900", "250"),
    "bimodal": ("200:50,3000:300", "50:20,600:100"),
    "long answers": ("100:50", "800:500"),
}
CONTEXT = 8192
NO_LIMIT = 1 << 30


def requests(name: str, tokens: int = 150_000) -> Lengths:
    """About so many ``tokens`` of output."""
    prompt, output = (lengths.parse("x", text) for text in DISTRIBUTIONS[name])
    mean = Lengths.of_quantiles(prompt, output, 100).output.mean()
    return Lengths.of_quantiles(prompt, output, int(tokens / mean)).cut(CONTEXT)


def options(**more: object) -> EngineConfig:
    return make_config({"model": "m", "prefix_caching": False, **more})


def blocks_for(config: EngineConfig, made: Lengths, sequences: int) -> int:
    """A cache in which about so many run."""
    held = NO_LIMIT / expect(config, made, EngineLimits(NO_LIMIT, NO_LIMIT, 1 << 40, None)).in_cache
    return max(round(sequences * held), CONTEXT // config.block_size)


# --------------------------------------------------------------------------- expected, simulated


@pytest.mark.parametrize("eviction", ["preempt", "never"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "bimodal" else pytest.mark.slow)
        for name in DISTRIBUTIONS
    ],
)
def test_as_many_run_as_are_expected(name: str, eviction: str) -> None:
    config, made = options(eviction=eviction), requests(name)
    blocks = blocks_for(config, made, 32)
    for streams in (None, 20) if eviction == "preempt" else (None,):
        limits = EngineLimits(blocks, NO_LIMIT, 1 << 40, streams)
        expected = expect(config, made, limits)
        found = simulate(config, made, limits, round(expected.running))
        assert expected.running == pytest.approx(found.running, rel=0.05)
        assert expected.used == pytest.approx(found.used, rel=0.06)
        assert expected.limit == ("the cache" if streams is None else "streams")
        if eviction == "never":
            assert expected.preemptions == found.preemptions == 0


def test_sequences_count_by_how_long_they_run() -> None:
    """The mean request is not the one that is met: the naive figure is far off."""
    config, made = options(), requests("bimodal")
    blocks = blocks_for(config, made, 64)
    expected = expect(config, made, EngineLimits(blocks, NO_LIMIT, 1 << 40, None))
    naive = blocks * 16 / float(made.prompt.mean() + made.output.mean() / 2)
    assert not 0.95 < naive / expected.running < 1.05


def test_requests_before_the_steady_state_do_not_count() -> None:
    made = requests("fixed", 50_000)
    found = simulate(options(), made, EngineLimits(10_000, 8, 1 << 12, None), 8)
    # All streams may end in the same step.
    assert 0 <= found.requests - len(made.prompt) <= 8


@pytest.mark.parametrize("streams", [None, 24])
def test_a_small_budget_is_the_limit(streams: int | None) -> None:
    config, made = options(), requests("narrow", 75_000)
    limits = EngineLimits(NO_LIMIT, 24, 64, streams)
    expected = expect(config, made, limits)
    found = simulate(
        config, made, dataclasses.replace(limits, num_blocks=10_000), round(expected.running)
    )
    assert expected.limit == "the token budget"
    assert expected.running == pytest.approx(found.running, rel=0.05)
    assert found.running < 16


def test_preemptions_are_of_the_right_size() -> None:
    config, made = options(), requests("long answers")
    limits = EngineLimits(blocks_for(config, made, 24), NO_LIMIT, 1 << 40, None)
    expected = expect(config, made, limits)
    found = simulate(config, made, limits, round(expected.running))
    assert found.preemptions > 1
    assert found.preemptions / 2 < expected.preemptions < 2 * found.preemptions
    spared = options(watermark=0.5)
    assert expect(spared, made, limits).preemptions < 0.01 * expected.preemptions


def test_at_a_share_of_all_limits_it_is_the_same_batch() -> None:
    config, made = options(max_model_len=CONTEXT), requests("narrow", 200_000)
    limits = EngineLimits(blocks_for(config, made, 320), NO_LIMIT, 1 << 40, None)
    sizes = planning.Sizes(config, limits, made, 0.0, 0, 0, 0)
    case = planning.compare(sizes, limits)
    assert case.observed.used == pytest.approx(case.expected.used, rel=0.03)
    assert case.observed.running < 100, "the simulation is smaller"
    assert case.simulated_running == pytest.approx(case.expected.running, rel=0.05)


def test_what_a_running_sequence_holds_is_counted_step_by_step() -> None:
    prompt, output = np.array([1, 15, 16, 17, 100]), np.array([1, 2, 40, 16, 333])
    sums = sizing._sum_blocks(Lengths(prompt, output), 16)
    for place, (p, o) in enumerate(zip(prompt.tolist(), output.tolist(), strict=True)):
        steps = [math.ceil((p + made) / 16) for made in range(o)]
        assert sums.blocks[place] == sum(steps)
        assert sums.squares[place] == sum(n * n for n in steps)


def test_the_memory_that_is_shown_is_that_of_the_options() -> None:
    """Here the choice does not settle: many sequences leave a cache in which few fit, and so on."""
    footprint = Footprint(
        max_model_len=4096,
        dtype="x",
        cache_dtype="x",
        weights=0,
        block=4096,
        step_token=4096,
        step_row=1 << 18,
        tensors={},
    )
    made = Lengths.of_quantiles([(900.0, 0.0)], [(50.0, 0.0)], 200)
    sizes = planning.choose_sizes(
        options(), set(), footprint=footprint, requests=made, memory=192 << 20, streams=None
    )
    seqs = sizes.limits.max_num_seqs
    assert sizes.steps == sizes.limits.budget * 4096 + seqs * (1 << 18)
    assert sizes.steps + sizes.cache <= sizes.memory


def footprint(weights: int) -> Footprint:
    return Footprint(
        max_model_len=4096,
        dtype="x",
        cache_dtype="x",
        weights=weights,
        block=4096,
        step_token=4096,
        step_row=4096,
        tensors={},
    )


def sizes_with(memory: int, weights: int, **given: int) -> planning.Sizes:
    made = Lengths.of_quantiles([(900.0, 0.0)], [(50.0, 0.0)], 200)
    return planning.choose_sizes(
        options(**given), set(given), footprint=footprint(weights), requests=made, memory=memory,
        streams=None,
    )  # fmt: skip


def test_a_given_number_of_sequences_has_a_budget_for_them() -> None:
    """Also if fewer fit into the cache."""
    sizes = sizes_with(memory=64 << 20, weights=0, max_num_seqs=1024)
    assert sizes.config.max_num_seqs == sizes.limits.max_num_seqs == 1024
    assert sizes.config.max_num_batched_tokens == 1024


def test_a_memory_in_which_only_a_smaller_batch_fits() -> None:
    """The logits of 256 sequences, the default, are larger than the memory."""
    large_rows = replace(footprint(weights=0), step_row=1 << 18)
    made = Lengths.of_quantiles([(900.0, 0.0)], [(50.0, 0.0)], 200)
    memory = 24 << 20
    assert options().max_num_seqs * large_rows.step_row > memory
    sizes = planning.choose_sizes(
        options(), set(), footprint=large_rows, requests=made, memory=memory, streams=None
    )
    assert sizes.steps == sizes.limits.budget * 4096 + sizes.limits.max_num_seqs * (1 << 18)
    assert sizes.steps + sizes.cache <= memory
    with pytest.raises(InvalidArgumentError, match="enough for weights"):
        planning.choose_sizes(
            options(max_num_seqs=256), {"max_num_seqs"}, footprint=large_rows, requests=made,
            memory=memory, streams=None,
        )  # fmt: skip


@pytest.mark.parametrize("snapshots", [False, True])
@pytest.mark.parametrize("block", [4096, 0])
def test_slots_for_states_are_part_of_the_cache(block: int, snapshots: bool) -> None:
    """A model may keep nothing in blocks: then slots alone limit what runs."""
    slot = 1 << 20
    with_states = replace(
        footprint(weights=0), slot=slot, block=block, cache="state", snapshots=snapshots
    )
    made = Lengths.of_quantiles([(900.0, 0.0)], [(50.0, 0.0)], 200)
    sizes = planning.choose_sizes(
        options(max_num_seqs=256), {"max_num_seqs"}, footprint=with_states, requests=made,
        memory=64 << 20, streams=None,
    )  # fmt: skip
    slots = sizes.limits.max_num_seqs
    assert 20 < slots < 64
    assert sizes.num_snapshots == (7 if snapshots else 0)
    slots += sizes.num_snapshots
    assert sizes.cache == sizes.limits.num_blocks * block + slots * slot
    longest = int((made.prompt + made.output).max())
    assert sizes.limits.num_blocks >= longest / sizes.config.block_size


def test_each_instance_has_weights_a_cache_and_steps_of_its_own() -> None:
    weights = 30 << 20
    memory = 80 << 20
    sizes = sizes_with(memory, weights, instances=2)
    assert 0.9 * memory < 2 * (weights + sizes.cache + sizes.steps) <= memory
    for too_much in ({"kv_cache_bytes": 12 << 20}, {"instances": 3}):
        with pytest.raises(InvalidArgumentError, match=r"enough for weights .* instances$"):
            sizes_with(memory, weights, **{"instances": 2, **too_much})


# --------------------------------------------------------------------------- lengths


def test_a_distribution_has_its_mean_and_deviation() -> None:
    made = Lengths.of_quantiles([(900.0, 400.0)], [(250.0, 0.0)], 4000)
    assert made.prompt.mean() == pytest.approx(900, rel=0.01)
    assert made.prompt.std() == pytest.approx(400, rel=0.03)
    assert set(made.output) == {250}
    two = Lengths.of_quantiles([(10.0, 0.0), (1000.0, 100.0)], [(5.0, 1.0)], 4000)
    assert (two.prompt == 10).mean() == pytest.approx(0.5)
    assert abs(np.corrcoef(two.prompt, two.output)[0, 1]) < 0.05


def test_counted_lengths_keep_their_shares() -> None:
    made = Lengths.of_quantiles(lengths.counted([7] * 30 + [100] * 10), [(5.0, 0.0)], 400)
    assert sorted(set(made.prompt)) == [7, 100]
    assert (made.prompt == 100).sum() == 100


def test_requests_are_cut_to_the_context() -> None:
    cut = Lengths(np.array([10, 90, 500]), np.array([20, 30, 5])).cut(100)
    assert cut.prompt.tolist() == [10, 90, 99]
    assert cut.output.tolist() == [20, 10, 1]


def test_a_sweep_gives_lengths_and_streams(tmp_path: Path) -> None:
    points = []
    for level, tokens in ((8, 130.0), (16, 131.0)):
        made = point(level, 100.0, 0.01)
        measured = replace(made.measured, output_tokens=5000, input_tokens_mean=tokens)
        points.append(replace(made, measured=measured))
    asked = {"input_tokens": "64:192", "output_tokens": "50"}
    result = record.Result("t", "m", True, "a", "s", "p", "2026", asked, tuple(points))
    best = record.Best(points[0].load, 100.0)
    record.write(replace(result, best=best), tmp_path / "result.json")
    found = lengths.read(tmp_path / "result.json")
    assert found.prompt == [(130.0, pytest.approx(128 / math.sqrt(12)))]
    assert (found.output, found.streams) == ([(50.0, 0.0)], 8)
    record.write(result, tmp_path / "result.json")
    found = lengths.read(tmp_path / "result.json")
    assert found.streams == 16, "the last load, without a best one"


def range_answer(*intervals: tuple[int, int, int]) -> dict[str, object]:
    """Prometheus' answer for (requests, prompt tokens, output tokens) in each interval."""
    sums = np.cumsum([(0, 0, 0), *intervals], axis=0)
    names = ("jitney_requests_total", "jitney_prompt_tokens_total", "jitney_generated_tokens_total")
    series = [
        {
            "metric": {"__name__": name} | ({"outcome": "stop"} if "requests" in name else {}),
            "values": [[15 * i, str(value)] for i, value in enumerate(column)],
        }
        for name, column in zip(names, sums.T.tolist(), strict=True)
    ]
    refused = {"__name__": "jitney_requests_total", "outcome": "refused"}
    series.append({"metric": refused, "values": [[15 * i, str(i)] for i in range(len(sums))]})
    return {"status": "success", "data": {"resultType": "matrix", "result": series}}


def test_a_range_of_prometheus_gives_mean_and_deviation(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    intervals = []
    for _ in range(400):
        of_one = int(chance.integers(5, 30))
        prompts = chance.normal(900, 200, of_one).round().sum()
        intervals.append((of_one, int(prompts), 40 * of_one))
    (tmp_path / "range.json").write_text(json.dumps(range_answer(*intervals)))
    found = lengths.read(tmp_path / "range.json")
    assert found.prompt == [(pytest.approx(900, rel=0.02), pytest.approx(200, rel=0.15))]
    assert (found.output, found.streams) == ([(40.0, 0.0)], None)


def test_a_counter_that_began_again_is_no_step_back(tmp_path: Path) -> None:
    answer = range_answer((1, 10, 5), (1, 10, 5), (1, 10, 5))
    for series in answer["data"]["result"]:  # type: ignore[index]
        values = series["values"]
        values[2][1], values[3][1] = values[1][1], str(2 * float(values[1][1]))
    (tmp_path / "range.json").write_text(json.dumps(answer))
    assert lengths.read(tmp_path / "range.json").prompt == [(10.0, 0.0)]


def test_series_of_two_servers_are_added_by_time(tmp_path: Path) -> None:
    """The second server began later, so its series are shorter."""
    answer = range_answer((1, 10, 5), (1, 10, 5), (1, 10, 5), (1, 10, 5))
    result = answer["data"]["result"]  # type: ignore[index]
    for series in range_answer((3, 90, 15), (3, 90, 15))["data"]["result"]:  # type: ignore[index]
        series["metric"]["instance"] = "another"
        series["values"] = [[at + 30, value] for at, value in series["values"]]
        result.append(series)
    (tmp_path / "range.json").write_text(json.dumps(answer))
    found = lengths.read(tmp_path / "range.json")
    assert found.prompt[0][0] == pytest.approx((4 * 10 + 2 * 90) / (4 + 2 * 3))
    # Intervals of 1, 1, 4 and 4 requests with 10, 10, 100 and 100 tokens; the mean of one is 22.
    assert found.prompt[0][1] == pytest.approx(math.sqrt((2 * 12**2 + 2 * 12**2 / 4) / 4))
    assert found.output == [(5.0, 0.0)]


def test_counters_of_no_output_are_refused(tmp_path: Path) -> None:
    (tmp_path / "range.json").write_text(json.dumps(range_answer((1, 10, 0), (2, 20, 0))))
    with pytest.raises(InvalidArgumentError, match="lacks jitney_generated_tokens_total"):
        lengths.read(tmp_path / "range.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "is not JSON"),
        ("{}", "is not the record of jitney bench"),
        ('{"status": "success"}', "no answer to a range query"),
        ('{"status": "success", "data": {"result": []}}', "lacks jitney_prompt_tokens_total"),
    ],
)
def test_a_source_that_holds_no_lengths_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=said):
        lengths.read(tmp_path / "x.json")


# --------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("m") / "m", "llama", tokenizer=True)


def run(checkpoint: Path, out: Path, *words: str) -> str:
    result = CliRunner().invoke(
        cli.make_app(), ["plan", str(checkpoint), "--out", str(out), *words]
    )
    if result.exception is not None:
        raise result.exception
    return result.output


LENGTHS = ("--prompt", "60:30", "--output", "40:20")


def test_it_prints_the_lines_and_draws_the_picture(checkpoint: Path, tmp_path: Path) -> None:
    said = run(checkpoint, tmp_path, "--memory", "8MiB", *LENGTHS, "--streams", "6")
    for part in ("weights in float32", "KV cache in float32", "bytes of a token", "p50", "p99"):
        assert part in said
    assert "6.0 / 6.0" in said
    lines = said.partition("For model.json:")[2].partition("Picture")[0]
    chosen = json.loads("{" + lines.strip().rstrip(",") + "}")
    assert make_config({"model": "m", **chosen}).max_model_len == 256
    assert 0.8 * 2**23 < chosen["kv_cache_bytes"] < 2**23
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_given_options_are_kept(checkpoint: Path, tmp_path: Path) -> None:
    given = {"max_num_seqs": 5, "max_num_batched_tokens": 64, "max_model_len": 128}
    given["kv_cache_bytes"] = 1 << 20
    words = [word for name, value in given.items() for word in ("--option", f"{name}={value}")]
    said = run(checkpoint, tmp_path, "--memory", "8MiB", *LENGTHS, *words)
    for name, value in given.items():
        assert f'"{name}": {value},' in said
    assert "max_num_seqs" in said.partition("preempted")[2].partition("For model.json")[0]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.json"])
def test_prompts_of_a_file_are_counted(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """Lines of JSON may be in a file that is named as a record is."""
    from jitney.text.tokenizer import Tokenizer

    texts = ["the bus stops here", "while others leave it on the way " * 5]
    path = tmp_path / name
    path.write_text("".join(json.dumps({"q": text}) + "\n" for text in texts))
    tokenizer = Tokenizer.load(checkpoint)
    longest = max(len(tokenizer.encode(text)) for text in texts) + 7
    said = run(
        checkpoint, tmp_path, "--memory", "8MiB", "--from", str(path), "--column", "q",
        "--output", "7",
    )  # fmt: skip
    assert f"sequences of {longest:,} tokens, p99" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "8 apples", *LENGTHS), "memory is '8 apples', but must be a size above 0"),
        (("--memory", "0GiB", *LENGTHS), "memory is '0GiB'"),
        (("--memory", "64KiB", *LENGTHS), "memory is 65536, but must be enough for weights of"),
        (("--memory", "8MiB", "--prompt", "60"), "--output is missing"),
        (("--memory", "8MiB", "--output", "60"), "--prompt is missing"),
        (("--memory", "8MiB", "--prompt", "0", "--output", "1"), "prompt is '0', but must be MEAN"),
        (("--memory", "8MiB", *LENGTHS, "--option", "dtype"), "option is 'dtype', but must be"),
        (("--memory", "8MiB", *LENGTHS, "--option", "dtyp=x"), "did you mean 'dtype'"),
        (("--memory", "8MiB", *LENGTHS, "--from", "none.json"), "cannot read none.json"),
        (
            ("--memory", "8MiB", *LENGTHS, "--from", "prompts.jsonl"),
            "prompt is '60:30', but must be left out: the prompts are those of prompts.jsonl",
        ),
        (("--memory", "8MiB", *LENGTHS, "--option", "kv_cache_bytes=9000000"), "memory is 8388608"),
    ],
)
def test_what_is_wrong_is_named(
    checkpoint: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(JitneyError) as refusal:
        run(checkpoint, tmp_path, *words)
    assert said in str(refusal.value)


def test_sizes_are_read() -> None:
    assert [read_bytes(text) for text in ("80GiB", "24GB", "1.5 M", "77")] == [
        80 << 30, 24 * 10**9, 1_500_000, 77,
    ]  # fmt: skip

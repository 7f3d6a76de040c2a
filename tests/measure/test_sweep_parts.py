"""Input files, the server's counts, the binary, and what perf_analyzer is told and says."""

import base64
import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from jitney.errors import InstallationError, InvalidArgumentError
from jitney_measure import inputs, perf_analyzer
from jitney_measure.options import Shared
from jitney_measure.perf_analyzer import PerfAnalyzer
from jitney_measure.record import Load
from jitney_measure.server_counts import (
    Snapshot,
    engine_work,
    read_metrics,
    read_statistics,
    stages,
)
from jitney_measure.target import Model, Target, Tensor

from tests.measure.exports import MODEL, SPEAKING, TARGET, driver, script, write_export

SPEAKER = Model(
    tuple(Tensor(name, "TYPE_STRING", (1,)) for name in ("text_input", "return_num_output_tokens"))
)


def test_made_prompts_differ_between_loads_and_repeat_with_the_seed(tmp_path: Path) -> None:
    options = Shared(input_tokens="20:40", output_tokens="5:9", sampling='{"temperature": 0}')
    made = inputs.Inputs(options, tmp_path)
    first, again, other = (
        made.prompts(SPEAKER, 1.0, salt=salt, count=1024) for salt in ("0", "0", "1")
    )
    assert first == again
    texts = {entry["text_input"][0] for entry in first + other}
    assert len(texts) == len(first) + len(other), "no two share a prompt"
    parameters = [json.loads(entry["sampling_parameters"][0]) for entry in first]
    assert {p["max_tokens"] for p in parameters} == {5, 6, 7, 8, 9}
    assert all(p["ignore_eos"] and p["temperature"] == 0 for p in parameters)
    assert all(entry["return_num_output_tokens"] == [True] for entry in first)
    assert "return_num_input_tokens" not in first[0], "the model has no such input"


class Counting(Target):
    """A server that says how many tokens a text has."""

    def get(self, path: str, body: object = None, kind: object = None) -> dict[str, int]:
        return {"num_input_tokens": 200}


COUNTING = Counting("here:1", "here:2", None)


def test_a_longer_load_adds_prompts_to_those_of_a_shorter_one(tmp_path: Path) -> None:
    made = inputs.Inputs(Shared(input_tokens="20:40"), tmp_path)
    short, long, short_again = (
        json.loads(made.file(COUNTING, SPEAKING, "0", count).read_bytes())["data"]
        for count in (8, 3000, 8)
    )
    assert long[: len(short)] == short
    assert len({entry["text_input"][0] for entry in long}) == 3000, "none is sent twice"
    assert short_again == long, "the file is there"


def test_options_of_zero_are_reported() -> None:
    reported = Shared(seed=0, stability=0.0).reported()
    assert reported["seed"] == "0"
    assert reported["stability"] == "0.0"
    assert "natural_end" not in reported
    assert "sampling" not in reported


def test_given_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\nanother\n", encoding="utf-8")
    options = Shared(prompts=tmp_path / "p.txt", output_tokens="7", natural_end=True)
    entries = inputs.Inputs(options, tmp_path).prompts(SPEAKER, 1.0, salt="0", count=1024)
    assert [entry["text_input"] for entry in entries] == [["one"], ["another"]]
    asked = '{"max_tokens": 7, "ignore_eos": false}'
    assert all(entry["sampling_parameters"] == [asked] for entry in entries)


@pytest.mark.parametrize(
    ("name", "said"),
    [("none", "cannot read"), ("empty", "holds no prompt"), ("p.jsonl", "in each line; --data")],
)
def test_what_holds_no_prompts_is_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        inputs.read_prompts(tmp_path / name)
    assert name in str(caught.value)


def test_the_server_is_asked_for_tokens_by_a_quoted_name() -> None:
    class Server(Target):
        def get(self, path: str, body: object = None, kind: object = None) -> dict[str, int]:
            assert path == "/v2/models/a%2Fb%20c%23+d@e/generate"
            return {"num_input_tokens": 400}

    model = Model((), "a/b c#+d@e", 8)
    assert inputs.words_per_token(Server("here:1", "here:2", None), model) == 0.5


def model_of(*tensors: Tensor) -> Model:
    return Model(tensors, "m", 8)


def test_rows_fit_the_inputs() -> None:
    model = model_of(
        Tensor("image", "TYPE_FP16", (2, -1), False),
        Tensor("ids", "TYPE_INT64", (3,), False),
        Tensor("text", "TYPE_STRING", (1,), False),
        Tensor("not_needed", "TYPE_FP32", (-1,), True),
    )
    rows = inputs.rows(model, {"image": (2, 5)}, seed=0)
    assert set(rows[0]) == {"image", "ids", "text"}
    image = np.frombuffer(base64.b64decode(rows[0]["image"]["b64"]), np.float16)
    assert image.shape == (10,)
    assert rows[0]["image"]["shape"] == [2, 5]
    assert image.std() > 0
    ids = np.frombuffer(base64.b64decode(rows[0]["ids"]["b64"]), np.int64)
    assert ids.tolist() == [1, 1, 1]
    assert len(rows[0]["text"]["content"]) == 1
    assert rows[0]["image"] != rows[1]["image"]


@pytest.mark.parametrize(
    ("tensor", "shapes", "words"),
    [
        (Tensor("x", "TYPE_FP32", (-1, 3), False), {}, "--shape x:1,3"),
        (Tensor("x", "TYPE_FP32", (2,), False), {"x": (3,)}, r"has the shape \[2\]"),
        (Tensor("x", "TYPE_FP32", (2,), False), {"y": (3,)}, "must be of x"),
        (Tensor("x", "TYPE_BF16", (2,), False), {}, "--data"),
    ],
)
def test_inputs_that_cannot_be_made(tensor: Tensor, shapes: dict, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        inputs.rows(model_of(tensor), shapes, seed=0)


def statistics(requests: int, executions: int) -> dict:
    spent = {"count": requests, "ns": requests * 2_000_000}
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    version = {
        "inference_count": requests,
        "execution_count": executions,
        "inference_stats": dict.fromkeys(parts, spent),
    }
    return {"model_stats": [version]}


def test_the_servers_counts_are_differences() -> None:
    before, after = (
        Snapshot({"m": read_statistics(said)}) for said in (statistics(10, 10), statistics(34, 15))
    )
    (stage,) = stages(before, after)
    assert (stage.inferences, stage.executions, stage.mean_batch) == (24, 5, 4.8)
    assert stage.queue_s == pytest.approx(0.002)
    assert stage.compute_s == pytest.approx(0.006)
    assert engine_work(before, after) is None
    (idle,) = stages(before, before)
    assert (idle.queue_s, idle.mean_batch) == (None, None)


def metrics(steps: int) -> str:
    """Of two instances and a neighbour."""
    lines = []
    for instance, model in (("m_0", "m"), ("m_1", "m"), ("other_0", "other")):
        labels = f'model="{model}",model_instance="{instance}",version="1"'
        for bound, count in (("1", steps), ("2", 3 * steps), ("+Inf", 4 * steps)):
            name = "jitney_batch_sequences_bucket"
            lines.append(f'{name}{{le="{bound}",{labels}}} {count}')
        for name, value in (("batch_sequences_sum", 9), ("batch_sequences_count", 4),
                            ("queue_seconds_sum", 0.5), ("queue_seconds_count", 2),
                            ("preemptions_total", 1)):  # fmt: skip
            lines.append(f"jitney_{name}{{{labels}}} {value * steps}")
    return "# HELP x y\n" + "\n".join(lines) + "\nnv_energy 3\n"


def test_the_engines_metrics_are_differences_over_instances() -> None:
    before, after = (Snapshot({}, read_metrics(metrics(steps), "m")) for steps in (10, 15))
    work = engine_work(before, after)
    assert work is not None
    assert work.steps == 2 * 4 * 5
    assert work.mean_batch == pytest.approx(9 / 4)
    assert work.queue_s == pytest.approx(0.25)
    assert work.preemptions == 10


def test_no_work_of_the_engine_is_shown_where_a_reading_failed() -> None:
    """Else a load would have all the work since the engine was started."""
    read = Snapshot({}, read_metrics(metrics(10), "m"))
    failed = Snapshot()
    assert engine_work(failed, read) is None
    assert engine_work(read, failed) is None
    idle = Snapshot({}, read_metrics("", "m"))  # it was read, and had no counts yet
    work = engine_work(idle, read)
    assert work is not None
    assert work.steps == 2 * 4 * 10


def test_addresses() -> None:
    target = Target.of("box:9001", None, None)
    assert (target.http, target.metrics) == ("box:8000", "http://box:8002/metrics")
    assert Target.of("[::1]:9001", None, None).http == "[::1]:8000"
    for text in ("box", ":8001", "box:", "http://box:x", "http://box:8001", "::1:8001", "box:0",
                 "box:65536", "box:8001/path", "[::1:8001", "a b:1"):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match="HOST:PORT"):
            Target.of(text, None, None)
        with pytest.raises(InvalidArgumentError, match=r"^http_url .*HOST:PORT"):
            Target.of("box:8001", text, None)
    for text in ("nonsense", "file:///etc/hosts", "http://", "http://box:65536/metrics"):
        with pytest.raises(InvalidArgumentError, match=r"^metrics_url .*http://HOST:PORT/metrics"):
            Target.of("box:8001", None, text)
    for given in (("me:secret@box:1", None, None), ("box:1", None, "http://me:secret@box:2/m")):
        with pytest.raises(InvalidArgumentError) as caught:
            Target.of(*given)
        assert "secret" not in str(caught.value)


def test_the_binary_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path / "environment"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(InstallationError, match=r"fetch_perf_analyzer\.py.*sdk"):
        PerfAnalyzer.find()
    (tmp_path / "bin").mkdir()
    on_path = script(tmp_path / "bin", "echo 1.0")
    assert PerfAnalyzer.find() == PerfAnalyzer(on_path, "1.0")
    (tmp_path / "environment/perf_analyzer").mkdir(parents=True)
    fetched = script(tmp_path / "environment/perf_analyzer", "echo 2.0 $LD_LIBRARY_PATH")
    (fetched.parent / "libb64.so.0d").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    assert PerfAnalyzer.find().version == f"2.0 {fetched.parent}:/elsewhere"
    assert PerfAnalyzer.find(on_path).binary == on_path
    said = "echo 'Perf Analyzer Version 2.48.0 (commit unknown)' >&2"
    assert PerfAnalyzer.find(script(tmp_path, said)).version == "2.48.0", (
        "as 2.48 has it, not on stdout"
    )
    broken = script(tmp_path, "echo libcudart.so.12: cannot open >&2; exit 127")
    with pytest.raises(InstallationError, match=r"does not start: libcudart\.so\.12"):
        PerfAnalyzer.find(broken)
    with pytest.raises(InstallationError, match="does not start"):
        PerfAnalyzer.find(tmp_path / "nothing")


def test_what_perf_analyzer_is_told() -> None:
    load, slow = Load("concurrency", 4), Load("rate", 2.5)
    words = driver(Path("pa")).arguments(TARGET, SPEAKING, load, Path("in"), 40, Path("export"))
    assert words[:6] == ["-m", "m", "-u", "here:8001", "-i", "grpc"]
    assert {"--streaming", "--async"} <= set(words)
    words = driver(Path("pa"), protocol="http").arguments(
        TARGET, MODEL, slow, Path("in"), 40, Path("out")
    )
    assert "here:8000" in words
    assert words[words.index("--request-rate-range") + 1] == "2.5"
    assert words[words.index("--request-distribution") + 1] == "constant"
    assert "--streaming" not in words


def test_no_prompt_is_sent_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a load of many requests, nor after a hang: it would be in the prefix cache."""
    streams = [(10 * i, [(10 * i + 5, 1), (10 * i + 9, 1)]) for i in range(60)]
    export = write_export(tmp_path / "e.json", streams)
    sent: list[str] = []
    answers = iter([True, False, True])  # the first try of the measurement hangs

    def run(self: PerfAnalyzer, words: list[str], *_: object) -> bool:
        given = dict(pairwise(words))
        entries = json.loads(Path(given["--input-data"]).read_bytes())["data"]
        count = int(given["--request-count"])
        assert count <= len(entries), "else the first ones are sent again"
        sent.extend(entry["text_input"][0] for entry in entries[:count])
        shutil.copy(export, given["--profile-export-file"])
        return next(answers)

    monkeypatch.setattr(PerfAnalyzer, "run", run)
    monkeypatch.setattr(perf_analyzer, "snapshot", lambda *_: Snapshot())
    monkeypatch.setattr(perf_analyzer, "_LANGUAGE_SETTLE_S", 0)
    options = Shared(requests=2500, input_tokens="20:40")
    load = Load("concurrency", 1)
    made = perf_analyzer.Driver(
        options, (load,), inputs.Inputs(options, tmp_path), PerfAnalyzer(Path("none"), "0")
    )
    assert made.run(COUNTING, SPEAKING, load).measured is not None
    assert len(sent) == len(set(sent)) == 8 + 2500 + 2500


def test_what_perf_analyzer_does_to_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure and a hang are points of the result; a hang is tried again first."""
    # The server counts late: three readings after the load until two agree.
    readings = iter([10, 10, 50, 70, 70])

    def late(*_: object) -> Snapshot:
        count = next(readings)
        return Snapshot({"m": read_statistics(statistics(count, count))})

    load = Load("concurrency", 1)
    export = write_export(tmp_path / "e.json", [(10 * i, [(10 * i + 9, "x")]) for i in range(60)])
    copying = f'while [ "$1" != --profile-export-file ]; do shift; done; cp {export} "$2"'
    with monkeypatch.context() as patch:
        patch.setattr(perf_analyzer, "snapshot", late)
        found = driver(script(tmp_path, copying)).run(TARGET, MODEL, load)
    assert found.stages[0].inferences == 60
    assert found.state == "steady", found
    assert found.measured is not None
    assert found.measured.requests == 60

    monkeypatch.setattr(perf_analyzer, "snapshot", lambda *_: Snapshot())
    failing = driver(script(tmp_path, "echo thread has error: FULL; exit 3"))
    found = failing.run(TARGET, MODEL, load)
    assert (found.state, found.measured) == ("failed", None)
    assert "status 3: thread has error: FULL" in found.remarks[0]

    monkeypatch.setattr(perf_analyzer, "_PATIENCE_S", 0.5)
    # The warm-up, whose length nobody knows before, gets more time in a second try.
    tries = tmp_path / "tries"
    slow = f"echo >> {tries}; [ $(wc -l < {tries}) -gt 2 ] || sleep 0.8; {copying}"
    found = driver(script(tmp_path, slow)).run(TARGET, MODEL, load)
    assert found.state == "steady", found.remarks
    hanging = driver(script(tmp_path, "exec sleep 600"))
    assert "hung twice" in hanging.run(TARGET, MODEL, load).remarks[0]

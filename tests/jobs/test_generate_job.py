"""Jobs that generate, over a tiny model: what comes out is what LLM gives for the same prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from jitney import LLM, SamplingParams
from jitney.errors import InvalidArgumentError
from jitney.messages import Logprob
from jitney_gateway.chat_answer import chat_logprob
from jitney_jobs.generate import GenerateOnServer, prompt_lengths
from jitney_jobs.job_making import make_job
from jitney_jobs.logprobs import COLUMN_TYPE, Positions

from tests.jobs.job_rows import bad, read, run, write_lines
from tests.tiny_models import make_checkpoint

ENGINE = {
    "dtype": "float32",
    "device": "cpu",
    "attention": "reference",
    "threads": 1,
    "kv_cache_bytes": 8 << 20,
    "max_num_seqs": 4,
}
TEXTS = ["the bus", "def step(batch):", "Zürich", "passengers board"] * 6
ROWS = [{"id": i, "word": text, "seed": i} for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("job") / "llama", "llama", tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **ENGINE) as llm:
        yield llm


def generate(folder: Path, tmp_path: Path, rows: list[Any], **settings: Any) -> list[Any]:
    tmp_path.mkdir(exist_ok=True)
    source = write_lines(tmp_path / "in.jsonl", rows)
    given = {"task": "generate", "map": None, "model": str(folder), "engine": ENGINE, **settings}
    assert run(source, tmp_path / "out", **given)
    return sorted(read(tmp_path / "out"), key=lambda row: row["id"])


def test_prompts_as_llm_completes_them(folder: Path, llm: LLM, tmp_path: Path) -> None:
    """In worker processes, with parameters from columns; a bad row of each kind among them."""
    long = {"id": 90, "word": "x" * 500, "seed": 1}
    wrong = [long, {"id": 91, "seed": 1}, {"id": 92, "word": "a", "seed": "x"}]
    rows = generate(
        folder,
        tmp_path,
        ROWS[:10] + wrong + ROWS[10:],
        prompt="{{see}} {word}:",
        sampling={"max_tokens": 9, "temperature": 0.8},
        sampling_column=["seed"],
        workers=1,
        output_format="parquet",
    )
    params = [SamplingParams(seed=i, max_tokens=9, temperature=0.8) for i in range(len(TEXTS))]
    direct = llm.generate([f"{{see}} {text}:" for text in TEXTS], params, progress=False)
    assert rows == [
        {
            **row,
            "seed": str(row["seed"]),  # a text, as one of them is no number
            "output": one.text,
            "finish_reason": one.finish_reason,
            "prompt_tokens": len(one.prompt_ids),
            "output_tokens": len(one.ids),
        }
        for row, one in zip(ROWS, direct, strict=True)
    ]
    reasons = {each["row"]: each["error"] for each in bad(tmp_path / "out")}
    assert reasons.keys() == {10, 11, 12}
    assert "the model's context holds" in reasons[10]
    assert reasons[11] == "column 'word' is missing"
    assert "seed is 'x', but must be an integer" in reasons[12]


def test_the_result_of_a_chains_second_job_is_called_as_it_says(
    folder: Path, tmp_path: Path
) -> None:
    greedy = {"temperature": 0}  # else an output may be empty, which is no prompt
    first = generate(folder, tmp_path / "1", ROWS[:3], column="word", max_tokens=4, sampling=greedy)
    second = generate(
        folder, tmp_path / "2", first, column="output", max_tokens=4, output_column="again"
    )
    result = {"again", "again_finish_reason", "again_prompt_tokens", "again_output_tokens"}
    for row, of_first in zip(second, first, strict=True):
        assert row.keys() == of_first.keys() | result
        assert row["output"] == of_first["output"]
        assert isinstance(row["again"], str)


@pytest.mark.parametrize("form", ["column", "template", "messages", "tier"])
def test_forms_of_a_prompt(folder: Path, llm: LLM, tmp_path: Path, form: str) -> None:
    rows: list[Any] = ROWS[:4]
    settings: dict[str, Any] = {"column": "word"}
    prompts = [row["word"] for row in rows]
    if form == "template":
        (tmp_path / "prompt.txt").write_text("{% if id %}Go on: {% endif %}{{ word | upper }}")
        settings = {"template": str(tmp_path / "prompt.txt")}
        prompts = [("Go on: " if row["id"] else "") + row["word"].upper() for row in rows]
    elif form == "messages":
        rows = [{**row, "word": [{"role": "user", "content": row["word"]}]} for row in rows]
        settings["chat"] = True
        prompts = [f"user: {text}\nassistant: " for text in prompts]
    elif form == "tier":
        tiers = [{"name": "fast"}, {"name": "bulk"}]
        settings |= {"engine": {**ENGINE, "tiers": tiers}, "sampling": {"tier": "fast"}}
    settings["sampling"] = {**settings.get("sampling", {}), "temperature": 0}
    made = generate(folder, tmp_path, rows, max_tokens=5, **settings)
    direct = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0), progress=False)
    assert [row["output"] for row in made] == [each.text for each in direct]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{{ a"}, "template cannot be used: "),
        ({"sampling": {"tmperature": 1}}, r"did you mean 'temperature'"),
        ({"sampling": {"n": 2}}, "sampling.n is 2, but must be 1"),
    ],
)
def test_refused_before_a_row_runs(
    folder: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        generate(folder, tmp_path, ROWS[:1], **settings)


def candidate(llm: LLM, logprob: Logprob) -> dict[str, Any]:
    return {
        "token_id": logprob.token_id,
        "token": llm.tokenizer.token_text(logprob.token_id),
        "logprob": logprob.logprob,
        "rank": logprob.rank,
    }


def tokens_of(llm: LLM, positions: list[Any]) -> list[Any]:
    """What the columns have of each token."""
    tokens: list[Any] = []
    for logprobs in positions:
        if logprobs is None:
            tokens.append(None)
            continue
        candidates = [candidate(llm, logprob) for logprob in logprobs]
        top = sorted(candidates, key=lambda each: each["rank"])
        tokens.append({**candidates[0], "top": top})
    return tokens


@pytest.mark.parametrize("output_format", ["parquet", "jsonl"])
def test_logprobs_are_columns(folder: Path, llm: LLM, tmp_path: Path, output_format: str) -> None:
    sampling = {"temperature": 1.5, "seed": 5, "logprobs": 2, "prompt_logprobs": 1}
    settings = {"column": "word", "max_tokens": 4, "sampling": sampling}
    rows = generate(folder, tmp_path, ROWS[:3], output_format=output_format, **settings)
    params = SamplingParams(max_tokens=4, **sampling)
    direct = llm.generate([row["word"] for row in ROWS[:3]], params, progress=False)
    for row, one in zip(rows, direct, strict=True):
        assert row["logprobs"] == tokens_of(llm, one.sequences[0].logprobs or [])
        assert row["prompt_logprobs"] == tokens_of(llm, one.prompt_logprobs or [])
        assert len(row["logprobs"]) == row["output_tokens"]
        assert row["prompt_logprobs"][0] is None
    if output_format == "parquet":
        (part,) = (tmp_path / "out").glob("part-*")
        assert pq.read_schema(part).field("logprobs").type == COLUMN_TYPE


def test_logprobs_of_some_rows(folder: Path, tmp_path: Path) -> None:
    rows = [{**ROWS[0], "logprobs": 1}, {**ROWS[1], "logprobs": 0}]
    settings = {"column": "word", "max_tokens": 2, "sampling_column": ["logprobs"]}
    first, second = generate(folder, tmp_path, rows, keep=["id"], **settings)
    assert {len(token["top"]) for token in first["logprobs"]} <= {1, 2}
    assert [len(token["top"]) for token in second["logprobs"]] == [1, 1]
    assert "prompt_logprobs" not in first


def test_logprobs_of_a_server(tmp_path: Path) -> None:
    """In the form of docs/contract.md."""
    sampling = {"logprobs": 1, "prompt_logprobs": 0}
    settings = {"input": "in", "output": "out", "model": "m", "server": "host:8001"}
    task = GenerateOnServer(make_job({**settings, "sampling": sampling}))
    assert task.prepare({"text": "a"})["return_logprobs"].tolist() == [True]
    chosen = {"logprob": -2.0, "rank": 3, "decoded_token": " a"}
    best = {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    texts = {
        "text_output": b"a",
        "finish_reason": b"length",
        "logprobs": msgspec.json.encode([{"17": chosen, "4": best}]),
        "prompt_logprobs": msgspec.json.encode([None, {"4": best}]),
    }
    answer = {name: np.array([text], np.object_) for name, text in texts.items()}
    counts = {name: np.array([1]) for name in ("num_input_tokens", "num_output_tokens")}
    columns = task.finish({}, {**answer, **counts})
    a = {"token_id": 17, "token": " a", "logprob": -2.0, "rank": 3}
    b = {"token_id": 4, "token": "b", "logprob": -0.5, "rank": 1}
    assert columns["logprobs"] == [{**a, "top": [b, a]}]
    assert columns["prompt_logprobs"] == [None, {**b, "top": [b]}]


def test_logprobs_in_the_forms_of_openai(llm: LLM) -> None:
    """What lines of its batch service are answered with is made of positions."""
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=2)
    (made,) = llm.generate("the bus", params, progress=False)
    logprobs = made.sequences[0].logprobs
    assert logprobs is not None
    for position, candidates in zip(Positions(llm.tokenizer).of(logprobs), logprobs, strict=True):
        assert position is not None
        entry = chat_logprob(dict(position), 2)
        assert entry["logprob"] == candidates[0].logprob
        assert entry["token"] == llm.tokenizer.token_text(candidates[0].token_id)
        assert [each["logprob"] for each in entry["top_logprobs"]] == [
            each.logprob for each in candidates
        ]


@pytest.mark.parametrize("source", ["data/", "."])
def test_prompts_of_a_folder_are_counted(
    folder: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """As ``jitney plan`` does, which writes nothing."""
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "in.jsonl", ROWS[:4])
    monkeypatch.chdir(tmp_path / "data" if source == "." else tmp_path)
    expected = [len(llm.tokenizer.encode(row["word"])) for row in ROWS[:4]]
    assert prompt_lengths(source, "word", str(folder)) == expected


def test_a_template_is_in_a_sandbox(folder: Path, tmp_path: Path) -> None:
    template = "{{ id.__class__.__mro__ }}"
    assert generate(folder, tmp_path, ROWS[:2], template=template) == []
    assert all("unsafe" in each["error"] for each in bad(tmp_path / "out"))

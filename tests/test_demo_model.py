"""The demo model that ships in the model repository is small, loads offline and knows Python.

These tests read the checkpoint only as a user would: files on disk, and the public loaders.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CHECKPOINT = Path(__file__).parents[1] / "model_repository/pylm/1/checkpoint"
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}

# From the standard library's heapq module, one of the files held out of training.
SNIPPET = '''
def heapreplace(heap, item):
    """Pop and return the current smallest value, and add the new item.

    This is more efficient than heappop() followed by heappush(), and can be
    more appropriate when using a fixed-size heap.  Note that the value
    returned may be larger than item!  That constrains reasonable uses of
    this routine unless written as part of a conditional replacement:

        if item > heap[0]:
            item = heapreplace(heap, item)
    """
    returnitem = heap[0]    # raises appropriate IndexError if heap is empty
    heap[0] = item
    _siftup(heap, 0)
    return returnitem

def heappushpop(heap, item):
    """Fast version of a heappush followed by a heappop."""
    if heap and heap[0] < item:
        item, heap[0] = heap[0], item
        _siftup(heap, 0)
    return item
'''


def safetensors_header(path: Path) -> dict[str, dict]:
    """Return name -> dtype and shape: the file starts with the header's length, 8 bytes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    loaded = transformers.LlamaForCausalLM.from_pretrained(
        CHECKPOINT, local_files_only=True, dtype=torch.float32
    )
    return loaded.eval()


def mean_loss(model, ids: list[int]) -> torch.Tensor:
    """Return the loss of each token after the first, in nats."""
    inputs = torch.tensor([ids])
    with torch.no_grad():
        logits = model(inputs).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, inputs[0, 1:], reduction="none")


def test_the_files_are_complete_and_small():
    assert {path.name for path in CHECKPOINT.iterdir()} == FILES
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 12_000_000


def test_the_weights_are_bf16_and_at_most_5_million():
    tensors = safetensors_header(CHECKPOINT / "model.safetensors").values()
    assert {tensor["dtype"] for tensor in tensors} == {"BF16"}
    shapes = [torch.Size(tensor["shape"]) for tensor in tensors]
    assert sum(shape.numel() for shape in shapes) <= 5_000_000


def test_the_end_token_is_the_same_everywhere(tokenizer):
    path = CHECKPOINT / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == tokenizer.eos_token_id
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|endoftext|>"


@pytest.mark.parametrize(
    "text",
    [
        SNIPPET,
        "",
        " ",
        "x",
        "\tif x:\n\t\treturn 0x1F + 3.14159e-12\n",
        "a  =  1   # two and three spaces\n\n\n\n   b = 2 \r\n \t \n",
        "s = 'naïve 日本語 🎉 e\u0301 \u00a0\u200b\ufeff'\n",  # no normalization
        "__init__ _private __name mixed_Case ** // != <|endoftext",
        "\x00\x01\x7f",
    ],
)
def test_decoding_gives_back_the_exact_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=True).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids


def test_the_model_knows_python(tokenizer, model):
    assert mean_loss(model, tokenizer(SNIPPET).input_ids).mean() < 3.5

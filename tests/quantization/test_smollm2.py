"""A real GGUF file: SmolLM2-135M-Instruct in Q4_1, with the tokenizer inside."""

import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from jitney.llm import LLM
from jitney.quantization.four_bits import Int4Linear
from jitney.text.tokenizer import Tokenizer

from tests.quantization.loading import eager_logits, linears, load, relative

FILE = Path(sys.prefix) / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = (
    "The bus stops here, and the passengers board while others leave it on the way to the city of "
    "London. It was a cold day in April."
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.exists(), reason="scripts/fetch_smollm2.py fetches it"),
]


def test_its_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.load(FILE)
    assert caplog.text == ""
    text = "In 2024 the bus stops here: naïve café, 東京\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [tokenizer.token_text(each) for each in tokenizer.encode("12345")] == list("12345")
    assert tokenizer.eos_ids == {2}
    chat = tokenizer.render_chat([{"role": "user", "content": "Hi"}], {})
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_end|>") == [2]


def test_its_logits_are_those_of_transformers() -> None:
    torch.set_num_threads(1)
    model = load(FILE, dtype="float32", threads=1)
    assert all(type(each) is Int4Linear for each in linears(model))
    right = transformers.AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, dtype=torch.float32
    )
    last = model.module.config.num_hidden_layers - 1
    compared = 0
    for name, each in model.module.named_modules():
        if name.endswith("proj") and name.split(".")[2] in ("0", str(last)):
            # Scales are in bfloat16, where the file has float16.
            assert relative(each.dequantized(), right.get_submodule(name).weight) < 0.005
            compared += 1
    assert compared == 14
    ids = torch.tensor([Tokenizer.load(FILE).encode(TEXT)])
    assert relative(eager_logits(model.module, ids), eager_logits(right, ids)) < 0.1


def test_it_answers_after_a_short_load() -> None:
    """It took 92 CPU seconds when each layer was dequantized for each trial; now it is 6."""
    before = os.times()
    options = {"device": "cpu", "dtype": "bfloat16", "threads": 1, "kv_cache_bytes": 64 << 20}
    with LLM(str(FILE), **options) as llm:
        after = os.times()
        (answer,) = llm.generate(
            ["The capital of France is"], {"temperature": 0.0, "max_tokens": 4}
        )
    assert "Paris" in answer.text
    assert after.user + after.system - before.user - before.system < 30

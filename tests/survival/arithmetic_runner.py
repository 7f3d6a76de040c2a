"""A runner without a model, for the real engine under the real server: a step takes no time of its
own, and a thousand sequences cost a processor little. Imported by the engine's fork server."""

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from jitney.batch import Batch, Row, RowOutput, StepOutput
from jitney.config import EngineConfig
from jitney.engine.grammars import refuse
from jitney.engine.loading import EngineParts, LoadModel
from jitney.messages import Logprob, ModelInfo
from jitney.text.tokenizer import TokenizerData

VOCAB = 320
CONTEXT = 2048
MADE = "made"
"""A file in the model's folder, of one byte for each token that was made."""
GATE = "gate"
"""While a file of this name lies there, the front sends no response, but for some time at most."""
HOLD = "hold"
"""While a file of this name lies there, a step does not end, but for some time at most."""
LONGEST_HOLD_S = 50.0
LOADER = "tests.survival.arithmetic_runner:loader"


def loader() -> LoadModel:
    """For the fork server."""
    return load


def load(config: EngineConfig, tokenizer: bytes) -> EngineParts:
    """``model`` of the options is the folder of a ``tokenizer.json``. It is read in any case."""
    text = Path(config.model, "tokenizer.json").read_text(encoding="utf-8")
    data = TokenizerData(text, eos_id=None, chat_template=None, special_tokens={})
    return EngineParts(ArithmeticRunner(config), msgspec.msgpack.encode(data), refuse)


def token_of(row: Row, index: int) -> int:
    """The token after this row: a letter that depends on the sequence and the position."""
    return 70 + (7 * index + row.end) % 20


@dataclass
class FinishedStep:
    """A step that was computed at its launch."""

    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


class ArithmeticRunner:
    """See ``jitney.execution.protocols.Runner``."""

    def __init__(self, config: EngineConfig) -> None:
        self._folder = Path(config.model)
        self._made = (self._folder / MADE).open("ab", buffering=0)
        self.info = ModelInfo(
            vocab_size=VOCAB,
            max_model_len=CONTEXT,
            num_blocks=1 << 14,
            block_size=config.block_size,
            eos_ids=frozenset(),
            dtype="float32",
            device="cpu",
            attention="none",
            num_parameters=0,
            max_num_batched_tokens=config.max_num_batched_tokens or config.max_num_seqs,
            kv_cache_bytes=1 << 14,
        )

    def launch(self, batch: Batch) -> "FinishedStep":
        """Compute the whole step."""
        until = time.monotonic() + LONGEST_HOLD_S
        while (self._folder / HOLD).exists() and time.monotonic() < until:
            time.sleep(0.01)
        output = StepOutput([self._serve(row) for row in batch.rows])
        self._made.write(b"." * sum(len(row.token_ids) for row in output.rows))
        return FinishedStep(output)

    def _serve(self, row: Row) -> RowOutput:
        tokens = [token_of(row, index) for index in row.sample]
        logprobs = None
        if row.params.logprobs is not None:
            logprobs = [[Logprob(token, -1.0, 1)] for token in tokens]
        return RowOutput(tokens, logprobs)

"""The process that checks grammars: one line of JSON in, one out, until its input ends.

``engine.grammar_check`` starts ``python -m jitney.text.grammar_process``, sends what :func:`setup`
gives, and kills it if a check takes too long: nothing else ends a native call. So it may also run
out of memory or crash, and only the grammar at hand is refused.
"""

import resource
import sys

import msgspec

from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError
from jitney.messages import ModelInfo
from jitney.sampling_params import StructuredOutputs
from jitney.text.tokenizer import TokenizerData

CHECKER = "jitney.text.grammar_process"
"""This module, for whoever starts it."""
_MEMORY_BYTES = 2 << 30


class Verdict(msgspec.Struct, frozen=True):
    """One of both is empty."""

    grammar: str = ""
    refusal: str = ""


class _Setup(msgspec.Struct, frozen=True):
    data: TokenizerData
    info: ModelInfo
    config: EngineConfig


def setup(data: TokenizerData, info: ModelInfo, config: EngineConfig) -> bytes:
    """The first line for the process: the model whose tokens grammars are tried with."""
    return msgspec.json.encode(_Setup(data, info, config)) + b"\n"


def main() -> None:
    """Answer until nobody asks any more, or one answer has taken too much processor time."""
    from jitney.text.grammar import GrammarCompiler, prove_grammar  # not in the front's process

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Setup)
    config = given.config
    try:
        compiler = GrammarCompiler(given.data, given.info)
    except ValueError:
        compiler = None
    _answer(Verdict())  # ready
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime + config.grammar_timeout_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        limits = (config.max_grammar_bytes, config.max_grammar_depth)
        try:
            if compiler is None:
                unknown = "structured_outputs is not supported for this model's tokenizer"
                raise InvalidArgumentError(unknown)
            structured = msgspec.json.decode(line, type=StructuredOutputs)
            _answer(Verdict(grammar=prove_grammar(structured, compiler, *limits)))
        except InvalidArgumentError as error:
            _answer(Verdict(refusal=str(error)))
        except Exception:
            _answer(Verdict(refusal="structured_outputs is malformed"))


def _answer(verdict: Verdict) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

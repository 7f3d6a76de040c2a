"""The process that checks grammars: it answers each line of JSON by a line, until its input ends.

``engine.grammar_check`` starts ``python -m jitney.text.grammar_process`` and sends what
:func:`checker_first_line` returns. If a check takes too long, it kills the process, because nothing
else ends a native call. The process may also run out of memory or crash. In each case only the
grammar at hand is refused.
"""

import resource
import sys
from typing import TYPE_CHECKING

import msgspec

from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError
from jitney.messages import ModelInfo
from jitney.sampling_params import StructuredOutputs
from jitney.text.tokenizer import TokenizerData

if TYPE_CHECKING:
    from jitney.text.grammar import GrammarCompiler

CHECKER_MODULE = "jitney.text.grammar_process"
"""This module, which :class:`~jitney.engine.grammar_check.GrammarChecker` starts."""
_MEMORY_BYTES = 2 << 30
"""Most address space of the process."""
_EXTRA_CPU_S = 2
"""The kernel ends the process when a check has taken so many seconds of processor time more than
``grammar_timeout_s``. That matters only if the front, which kills it earlier, is gone."""


class Verdict(msgspec.Struct, frozen=True):
    """An answer: a grammar, or why what was asked for is refused. The other one is empty."""

    grammar: str = ""
    refusal: str = ""


_READY = Verdict()
"""The answer to the first line: the process can check grammars now."""


class _Setup(msgspec.Struct, frozen=True):
    data: TokenizerData
    info: ModelInfo
    config: EngineConfig


def checker_first_line(data: TokenizerData, info: ModelInfo, config: EngineConfig) -> bytes:
    """The first line for the process: the model whose tokens grammars are tried with."""
    return msgspec.json.encode(_Setup(data, info, config)) + b"\n"


def main() -> None:
    """Answer until nobody asks any more, or one answer has taken too much processor time."""
    from jitney.text.grammar import GrammarCompiler  # not in the front's process

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Setup)
    try:
        compiler = GrammarCompiler(given.data, given.info)
    except ValueError:
        compiler = None
    _answer(_READY)
    for line in sys.stdin.buffer:
        _limit_processor_time(given.config.grammar_timeout_s)
        _answer(_check(line, compiler, given.config))


def _limit_processor_time(seconds: float) -> None:
    """Have the kernel end the process after so many seconds more of processor time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = usage.ru_utime + usage.ru_stime
    limit = int(used + seconds) + _EXTRA_CPU_S  # counts from the process's begin
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _check(line: bytes, compiler: "GrammarCompiler | None", config: EngineConfig) -> Verdict:
    from jitney.text.grammar import prove_grammar

    if compiler is None:
        unknown = "structured_outputs is not supported for this model's tokenizer"
        return Verdict(refusal=unknown)
    try:
        structured = msgspec.json.decode(line, type=StructuredOutputs)
        grammar = prove_grammar(
            structured, compiler, config.max_grammar_bytes, config.max_grammar_depth
        )
    except InvalidArgumentError as error:
        return Verdict(refusal=str(error))
    except Exception:
        # Keywords of a schema may have values of any type ("minItems": "x"), and json_schema does
        # not check the types of all of them.
        return Verdict(refusal="structured_outputs is malformed")
    return Verdict(grammar=grammar)


def _answer(verdict: Verdict) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

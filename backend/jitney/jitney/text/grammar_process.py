"""The process that checks grammars: one line of JSON in, one out, until its input ends.

``engine.grammar_check`` starts ``python -m jitney.text.grammar_process TIMEOUT BYTES DEPTH`` and
kills it if it takes too long: nothing else ends a native call. So it may also run out of memory or
crash, and only the grammar at hand is refused.
"""

import resource
import sys

import msgspec

from jitney.errors import InvalidArgumentError
from jitney.sampling_params import StructuredOutputs
from jitney.text.grammar import prove_grammar

_MEMORY_BYTES = 2 << 30


class Verdict(msgspec.Struct, frozen=True):
    """One of both is empty."""

    grammar: str = ""
    refusal: str = ""


def main(timeout_s: float, max_bytes: int, max_depth: int) -> None:
    """Answer until nobody asks any more, or one answer has taken that much processor time."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _answer(Verdict())  # ready
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime + timeout_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            structured = msgspec.json.decode(line, type=StructuredOutputs)
            _answer(Verdict(grammar=prove_grammar(structured, max_bytes, max_depth)))
        except InvalidArgumentError as error:
            _answer(Verdict(refusal=str(error)))
        except Exception:
            _answer(Verdict(refusal="structured_outputs is malformed"))


def _answer(verdict: Verdict) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

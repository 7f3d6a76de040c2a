"""ONNX Runtime on another processor, which an emulator plays: `make test-avx2` names one.

As a program, in the emulator, it runs one model for the process that started it.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

EMULATOR = "TEST_EMULATOR"


def emulated_run(path: Path) -> Any:
    """A function that runs an ONNX file in the emulator; None if none is named."""
    if EMULATOR not in os.environ:
        return None
    command = [*os.environ[EMULATOR].split(), sys.executable, __file__, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None

    def run(inputs: Any) -> Any:
        pickle.dump(dict(inputs), process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)

    return run


def main(path: str) -> None:
    from onnxruntime import InferenceSession

    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    while sys.stdin.buffer.peek(1):
        outputs = session.run(names, pickle.load(sys.stdin.buffer))
        pickle.dump(dict(zip(names, outputs, strict=True)), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])

"""The command ``jitney generate``: a prompt is continued on the terminal."""

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from jitney.offline.llm import LLM
from jitney.sampling_params import SamplingParams


def generate_on_terminal(
    prompt: str, model: str, params: SamplingParams, options: Mapping[str, Any]
) -> None:
    """Print the prompt and its continuation, token by token. ``-`` reads the prompt from standard
    input. ``options`` are LLM's; what is None is left to its default."""
    from transformers.utils import logging as transformers_logging  # slow to import

    text = sys.stdin.read() if prompt == "-" else prompt
    transformers_logging.disable_progress_bar()  # it would write between our lines
    given = {name: value for name, value in options.items() if value is not None}
    note = f"Loading {model} (the first time, kernels are compiled) …"
    with Console(stderr=True, highlight=False).status(note):
        llm = LLM(model, **given)
    with llm:
        Console(highlight=False).print(escape(text), style="dim", end="", soft_wrap=True)
        for piece in llm.stream(text, params):
            print(piece.text, end="", flush=True)
        print()

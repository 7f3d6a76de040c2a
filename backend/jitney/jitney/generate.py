"""The command ``jitney generate``: a prompt goes on in the terminal, without a server."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from jitney.errors import InvalidArgumentError
from jitney.sampling_params import SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads standard input.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint folder, or the id of a model in the local hub cache. Default in a "
            "source checkout: the demo model."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to make.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from this share of probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many tokens; 0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability, relative to the best.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 avoids repetition.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end of sequence.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. Default: the cores this process may use.")
    ] = None,
) -> None:
    """Continue a prompt on the terminal, token by token, without a server.

    It runs the same engine as the server, in this process.

    Examples:

        jitney generate "def fibonacci(n):"
        jitney generate "import os" --temperature 0.8 --top-p 0.95 --seed 7 --max-tokens 200
        jitney generate - --model path/to/checkpoint < prompt.txt
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    options = {"dtype": dtype, "device": device, "threads": threads}
    complete_on_terminal(prompt, model or str(demo_checkpoint()), params, options)


def demo_checkpoint() -> Path:
    """The demo model of a source checkout. Raises InvalidArgumentError outside of one."""
    checkout = Path(__file__).resolve().parents[3]
    folder = checkout / "model_repository" / "pylm" / "1" / "checkpoint"
    if not folder.is_dir():
        raise InvalidArgumentError(
            "no model was named, and the demo model is only in a source checkout: "
            "give --model a checkpoint folder"
        )
    return folder


def complete_on_terminal(
    prompt: str, model: str, params: SamplingParams, options: Mapping[str, Any]
) -> None:
    """Print the prompt and its continuation, token by token. The prompt ``-`` stands for what is
    read from standard input. ``options`` are those of LLM; one that is None keeps its default."""
    from rich.console import Console
    from rich.text import Text
    from transformers.utils import logging as transformers_logging  # slow to import

    from jitney.llm import LLM

    text = sys.stdin.read() if prompt == "-" else prompt
    transformers_logging.disable_progress_bar()  # it would write between our lines
    given = {name: value for name, value in options.items() if value is not None}
    note = f"Loading {model} (the first time, kernels are compiled) …"
    # As a Text: rich would replace markup and codes such as ``:b:`` in a str.
    with Console(stderr=True, highlight=False).status(Text(note)):
        llm = LLM(model, **given)
    with llm:
        Console(highlight=False).print(Text(text), style="dim", end="", soft_wrap=True)
        # A mapping, in which nothing is left to the checkpoint: the command has its own defaults.
        for piece in llm.stream(text, msgspec.structs.asdict(params)):
            print(piece.text, end="", flush=True)
        print()

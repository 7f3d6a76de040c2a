"""The one place where a prompt becomes a :class:`messages.Submit`: encoded, checked, completed.

Called by the server's front and by the offline class, so that both refuse the same things in the
same words, before a request joins any queue. Every refusal is an InvalidArgumentError
that names the field, the value and the bound.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError, nearest
from jitney.messages import ModelInfo, Submit
from jitney.sampling_params import (
    SamplingParams,
    StructuredOutputs,
    check_sampling_params,
    check_token_ids,
)
from jitney.text.chat import Chat, check_text, parse_chat
from jitney.text.tokenizer import Tokenizer

_ADAPTER = "adapter_config.json"
_MOST_NAME_BYTES = 255  # of a folder
_LEAST_PROMPT_BYTES = 65_536
_BYTES_PER_TOKEN = 32


def max_prompt_bytes(config: EngineConfig, info: ModelInfo) -> int:
    """The option, or what no context's worth of ordinary tokens exceeds."""
    if config.max_prompt_bytes is not None:
        return config.max_prompt_bytes
    return max(_LEAST_PROMPT_BYTES, _BYTES_PER_TOKEN * info.max_model_len)


def decode_prompt_text(
    data: bytes, config: EngineConfig, info: ModelInfo, field: str = "text_input"
) -> str:
    """A client's bytes as text. Its size is checked before anything reads it."""
    check_prompt_size(field, len(data), config, info)
    try:
        text = data.decode("utf-8", "strict")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{field} is not UTF-8: {error.reason} at byte {error.start}"
        ) from None
    check_text(field, text)
    return text


def encode_input(
    field: str, data: bytes, tokenizer: Tokenizer, config: EngineConfig, info: ModelInfo
) -> tuple[list[int], str | None]:
    """Ids of what a client gave as ``text_input`` or ``messages``, and the text of the former."""
    text = decode_prompt_text(data, config, info, field)
    if field == "text_input":
        return encode_prompt(text, tokenizer, config, info), text
    return encode_chat(parse_chat(text, config), tokenizer, config, info), None


def encode_prompt(
    text: str, tokenizer: Tokenizer, config: EngineConfig, info: ModelInfo
) -> list[int]:
    """Ids of a completion prompt, with the special tokens that the tokenizer puts around it."""
    if 4 * len(text) > max_prompt_bytes(config, info):  # else it cannot be too large
        check_prompt_size("text_input", len(text.encode("utf-8", "surrogatepass")), config, info)
    check_text("text_input", text)
    ids = tokenizer.encode(text)
    # A prompt that holds only what the tokenizer adds is empty too.
    if len(ids) < 8 and not tokenizer.encode(text, add_special_tokens=False):
        raise InvalidArgumentError.of("text_input", text, "a text of at least one token")
    return ids


def encode_chat(
    chat: Chat, tokenizer: Tokenizer, config: EngineConfig, info: ModelInfo
) -> list[int]:
    """Ids of a checked chat. The rendered text must keep the prompt's size limit."""
    rendered = tokenizer.render_chat(chat.messages, chat.parameters, chat.tools)
    check_prompt_size("messages", len(rendered.encode()), config, info)
    return tokenizer.encode(rendered, add_special_tokens=False)


def make_submit(
    *,
    key: int,
    prompt_ids: list[int],
    params: SamplingParams,
    tokenizer: Tokenizer,
    info: ModelInfo,
    config: EngineConfig,
    now: float,
    check_grammar: Callable[[StructuredOutputs], str],
    stream: bool = True,
    request_id: str = "",
) -> Submit:
    """Check a request against its model and complete it. Without ``stream`` the server holds the
    answer until it is whole, and so its size is bounded.

    Draws a missing seed, gathers the ids that end a sequence, encodes bad words, puts what
    ``check_grammar`` makes of ``structured_outputs`` in their place, and turns ``deadline_ms`` into
    a time of the monotonic clock, whose present is ``now``. ``max_tokens`` -1 becomes what context,
    cache and that bound leave.
    """
    if params.max_tokens == -1:
        room = min(info.max_model_len, info.num_blocks * info.block_size) - len(prompt_ids)
        if not stream:
            room = min(room, config.max_answer_entries // (params.n * (1 + (params.logprobs or 0))))
        params = msgspec.structs.replace(params, max_tokens=max(1, room))
    check_sampling_params(params, config, vocab_size=info.vocab_size)
    if params.lora_name is not None:
        check_adapter(params.lora_name, config)
    if not prompt_ids:
        raise InvalidArgumentError("input_ids is empty, but a prompt must have at least one token")
    check_token_ids("input_ids", prompt_ids, info.vocab_size)
    _check_length(len(prompt_ids), params.max_tokens, info.max_model_len)
    if not stream:
        _check_answer(len(prompt_ids), params, config.max_answer_entries)
    ends = set(params.stop_token_ids)
    if not params.ignore_eos:
        ends |= info.eos_ids | tokenizer.eos_ids
    stop_ids = frozenset(each for each in ends if each < info.vocab_size)
    _check_satisfiable(params, stop_ids)
    if params.seed is None or params.seed == -1:  # vLLM's clients send -1 for none
        params = msgspec.structs.replace(params, seed=secrets.randbits(63))
    structured, grammar = params.structured_outputs, ""
    if structured is not None:
        grammar = check_grammar(structured)
        params = msgspec.structs.replace(params, structured_outputs=None)
    return Submit(
        key=key,
        prompt=prompt_ids,
        params=params,
        stop_ids=stop_ids,
        bad_words_ids=_encode_bad_words(params.bad_words, tokenizer, info.vocab_size),
        arrival=now,
        deadline=deadline_of(params, now),
        request_id=request_id,
        grammar=grammar,
    )


def deadline_of(params: SamplingParams, arrival: float) -> float | None:
    """When a request that came at ``arrival`` is to end, in seconds of the same clock."""
    if params.deadline_ms is None:
        return None
    return arrival + params.deadline_ms / 1000


def adapter_names(config: EngineConfig) -> list[str]:
    """What ``lora_name`` may be: folders below that of option ``adapters``, as of now."""
    if config.adapters is None:
        return []
    found = Path(config.adapters).glob(f"*/{_ADAPTER}")
    return sorted(each.parent.name for each in found if each.parent.name[0] != ".")


def check_adapter(name: str, config: EngineConfig) -> None:
    """Raise InvalidArgumentError if the model has no adapter of that name."""
    if len(name.encode("utf-8", "surrogatepass")) > _MOST_NAME_BYTES:
        raise InvalidArgumentError.of("lora_name", name, f"of at most {_MOST_NAME_BYTES} bytes")
    plain = Path(name).name == name and name[:1] not in ("", ".") and "\0" not in name
    root = config.adapters
    # Path.is_file would raise for what may not be read.
    if not plain or root is None or not os.path.isfile(Path(root, name, _ADAPTER)):
        near = nearest(name, adapter_names(config)) if plain else ""
        bound = "the name of an adapter of this model"
        raise InvalidArgumentError.of("lora_name", name, f"{bound}{near}")


def check_prompt_size(field: str, size: int, config: EngineConfig, info: ModelInfo) -> None:
    """Raise InvalidArgumentError if a prompt of ``size`` bytes is too large."""
    limit = max_prompt_bytes(config, info)
    if size > limit:
        raise InvalidArgumentError(
            f"{field} has {size:,} bytes, but at most {limit:,} are taken (max_prompt_bytes)"
        )


def _check_length(prompt: int, max_tokens: int, context: int) -> None:
    if prompt + max_tokens > context:
        raise InvalidArgumentError(
            f"the prompt has {prompt} tokens and max_tokens is {max_tokens}, together "
            f"{prompt + max_tokens}, but the model's context holds {context}"
        )


def _check_answer(prompt: int, params: SamplingParams, limit: int) -> None:
    """Raise InvalidArgumentError if an answer that is not streamed could have too many entries."""
    entries = params.n * params.max_tokens * (1 + (params.logprobs or 0))
    asked = (
        f"n {params.n} × max_tokens {params.max_tokens:,} × (logprobs {params.logprobs or 0} + 1)"
    )
    if params.prompt_logprobs is not None:
        entries += prompt * (1 + params.prompt_logprobs)
        asked += f" + {prompt:,} prompt tokens × (prompt_logprobs {params.prompt_logprobs} + 1)"
    if entries > limit:
        raise InvalidArgumentError(
            f"{asked} is {entries:,}, but an answer that is not streamed may have at most "
            f"{limit:,} entries (max_answer_entries); set stream, or ask for less"
        )


def _check_satisfiable(params: SamplingParams, stop_ids: frozenset[int]) -> None:
    allowed = params.allowed_token_ids
    if allowed is not None and params.min_tokens > 0 and stop_ids.issuperset(allowed):
        raise InvalidArgumentError(
            f"allowed_token_ids holds only ids that end the sequence, but min_tokens is "
            f"{params.min_tokens}: no first token is left"
        )


def _encode_bad_words(
    words: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int
) -> list[list[int]]:
    """Each word as encoded at the start of a text and, if that has as many tokens and begins with
    another one, as encoded after a space (vLLM's rule)."""
    encoded: list[list[int]] = []
    for word in words:
        check_text("bad_words", word)
        at_start = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        if not at_start:
            raise InvalidArgumentError.of("bad_words", word, "of words of at least one token")
        encoded.append(at_start)
        inside = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if len(inside) == len(at_start) and inside[0] != at_start[0]:
            encoded.append(inside)
    for ids in encoded:
        check_token_ids("bad_words", ids, vocab_size)
    return encoded

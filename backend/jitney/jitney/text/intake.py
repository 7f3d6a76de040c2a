"""The one place where a prompt becomes a :class:`messages.Submit`: encoded, checked, completed.

Called by the server's front and by the offline class, so that both refuse the same things in the
same words, before a request joins any queue. Every refusal is an InvalidArgumentError that names
the field, the value and the bound.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
from jitney.text.chat import Chat, parse_chat
from jitney.text.tokenizer import Tokenizer, check_text

_ADAPTER = "adapter_config.json"
"""A folder with this file is an adapter."""
_MOST_NAME_BYTES = 255  # of a folder
_LEAST_PROMPT_BYTES = 65_536
_BYTES_PER_TOKEN = 32
"""For each token of the context, a prompt may have so many bytes, unless the option
``max_prompt_bytes`` is set. Ordinary tokens have far fewer."""
_MOST_BYTES_PER_CHARACTER = 4
_FEW_IDS = 8
"""With fewer ids than this, all of them may be special tokens that the tokenizer added: then the
text alone is encoded once more."""


class EncodedPrompt(NamedTuple):
    """A prompt that is ready for :func:`make_submit`."""

    ids: list[int]
    text: str | None
    """What was given as ``text_input``; None if the prompt was given otherwise."""


def max_prompt_bytes(config: EngineConfig, info: ModelInfo) -> int:
    """Most bytes of a prompt. Without the option: more bytes than any ordinary text that fits into
    the context."""
    if config.max_prompt_bytes is not None:
        return config.max_prompt_bytes
    return max(_LEAST_PROMPT_BYTES, _BYTES_PER_TOKEN * info.max_model_len)


def decode_prompt_text(
    data: bytes, config: EngineConfig, info: ModelInfo, field: str = "text_input"
) -> str:
    """A client's bytes as text. Their number is checked before anything reads them."""
    check_prompt_size(field, len(data), config, info)
    try:
        text = data.decode("utf-8", "strict")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{field} is not UTF-8: {error.reason} at byte {error.start}"
        ) from None
    check_text(field, text)
    return text


def encode_client_bytes(
    field: str, data: bytes, tokenizer: Tokenizer, config: EngineConfig, info: ModelInfo
) -> EncodedPrompt:
    """Encode what a client gave as ``field``: ``text_input`` or ``messages``."""
    text = decode_prompt_text(data, config, info, field)
    if field == "text_input":
        return EncodedPrompt(encode_prompt(text, tokenizer, config, info), text)
    chat = parse_chat(text, config)
    return EncodedPrompt(encode_chat(chat, tokenizer, config, info), None)


def encode_prompt(
    text: str, tokenizer: Tokenizer, config: EngineConfig, info: ModelInfo
) -> list[int]:
    """Ids of a completion prompt, with the special tokens that the tokenizer puts around it."""
    tokenizer.check_takes("text_input")
    # Its bytes are counted only if they may be too many.
    if _MOST_BYTES_PER_CHARACTER * len(text) > max_prompt_bytes(config, info):
        size = len(text.encode("utf-8", "surrogatepass"))
        check_prompt_size("text_input", size, config, info)
    check_text("text_input", text)
    ids = tokenizer.encode(text)
    if len(ids) < _FEW_IDS:
        own_ids = tokenizer.encode(text, add_special_tokens=False)
        if not own_ids:
            raise InvalidArgumentError.of("text_input", text, "a text of at least one token")
    return ids


def encode_chat(
    chat: Chat, tokenizer: Tokenizer, config: EngineConfig, info: ModelInfo
) -> list[int]:
    """Ids of a checked chat. The limit of a prompt's size holds for the rendered text too."""
    # As characters, so that too long a text is not rendered to its end. The bytes of the text,
    # which may be more, are checked below.
    most = max_prompt_bytes(config, info)
    rendered = tokenizer.render_chat(
        chat.messages, chat.parameters, chat.tools, most, continues=chat.continues
    )
    check_prompt_size("messages", len(rendered.encode()), config, info)
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    if not ids:
        raise InvalidArgumentError("messages: the chat template renders them to no token")
    return ids


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
    """Check a request against its model, and complete its parameters. Raises InvalidArgumentError.

    - a missing seed is drawn;
    - a ``max_tokens`` of -1 becomes as many as fit;
    - what ``check_grammar`` returns takes the place of ``structured_outputs``;
    - the ids that end a sequence are gathered, and bad words are encoded;
    - ``deadline_ms`` becomes a time of the monotonic clock, counted from ``now``: the request's
      arrival.

    Without ``stream`` the server holds the answer until it is complete, so its size is limited
    (``max_answer_entries``).
    """
    check_sampling_params(params, config, vocab_size=info.vocab_size)
    for name in ("stop", "bad_words", "structured_outputs"):
        if getattr(params, name):
            tokenizer.check_takes(name)
    if params.max_tokens == -1:
        most = _most_tokens(params, len(prompt_ids), config, info, stream=stream)
        params = msgspec.structs.replace(params, max_tokens=most)
        # Once more, because min_tokens could not be compared with -1.
        check_sampling_params(params, config, vocab_size=info.vocab_size)
    if params.lora_name is not None:
        check_adapter(params.lora_name, config)
    if not prompt_ids:
        raise InvalidArgumentError("input_ids is empty, but a prompt must have at least one token")
    check_token_ids("input_ids", prompt_ids, info.vocab_size)
    _check_length(len(prompt_ids), params.max_tokens, info.max_model_len)
    if not stream:
        _check_answer(len(prompt_ids), params, config.max_answer_entries)
    stop_ids = _stop_ids(params, tokenizer, info)
    _check_satisfiable(params, stop_ids)
    if params.seed in (None, -1):  # vLLM's clients send -1 for none
        params = msgspec.structs.replace(params, seed=secrets.randbits(63))
    grammar = ""
    if params.structured_outputs is not None:
        grammar = check_grammar(params.structured_outputs)
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


def _most_tokens(
    params: SamplingParams, num_prompt: int, config: EngineConfig, info: ModelInfo, *, stream: bool
) -> int:
    """The number of tokens that ``max_tokens`` -1 stands for: as many as fit into the context and
    the cache and, unless the answer is streamed, into its limit of entries. ``params`` must have
    been checked."""
    cache_tokens = _most_blocks(params, num_prompt, config, info) * info.block_size
    most = min(info.max_model_len, cache_tokens) - num_prompt
    if not stream:
        left = config.max_answer_entries - _prompt_entries(params, num_prompt)
        entries_per_step = params.n * _entries_per_token(params)
        most = min(most, left // entries_per_step)
    # It may be below 1, and becomes 1. What happens to the request then depends on the cause:
    #
    # - the prompt fills the context, or is longer: _check_length refuses it;
    # - the prompt is larger than the cache: the engine refuses it;
    # - one token of each sequence already gives too many entries: _check_answer refuses it;
    # - n sequences do not fit into the cache together: it is served, because all of them end when
    #   the prompt is computed.
    return max(1, most)


def _most_blocks(
    params: SamplingParams, num_prompt: int, config: EngineConfig, info: ModelInfo
) -> int:
    """Most blocks that one sequence of a request may take. With ``eviction: never`` all sequences
    that run at once must fit into the cache together: the same rule as in ``core.needs``."""
    if config.eviction != "never":
        return info.num_blocks
    max_running = min(config.max_num_seqs, info.max_num_batched_tokens)
    if config.tiers:
        cap = config.tiers[config.tier_of(params.tier)].max_running
        if cap is not None:
            max_running = min(max_running, cap)
    if params.n > max_running:
        # No block counts as shared: a sequence that waits may find no block of the prompt cached.
        return info.num_blocks // max_running
    # All n run at once, and share the full blocks of the prompt.
    shared = num_prompt // info.block_size
    return shared + (info.num_blocks - shared) // params.n


def _entries_per_token(params: SamplingParams) -> int:
    """Entries of an answer for each token of its output: the token, and its logprobs."""
    return 1 + (params.logprobs or 0)


def _prompt_entries(params: SamplingParams, num_prompt: int) -> int:
    """Entries of an answer for its prompt: each token and its logprobs, if they were asked for."""
    if params.prompt_logprobs is None:
        return 0
    return num_prompt * (1 + params.prompt_logprobs)


def _stop_ids(params: SamplingParams, tokenizer: Tokenizer, info: ModelInfo) -> frozenset[int]:
    """The ids that end a sequence of this request."""
    stop_ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= info.eos_ids | tokenizer.eos_ids
    # A tokenizer or a configuration may name ids that the model does not have.
    return frozenset(token_id for token_id in stop_ids if token_id < info.vocab_size)


def deadline_of(params: SamplingParams, arrival: float) -> float | None:
    """When a request that came at ``arrival`` is to end, in seconds of the same clock."""
    if params.deadline_ms is None:
        return None
    return arrival + params.deadline_ms / 1000


def adapter_names(config: EngineConfig) -> list[str]:
    """What ``lora_name`` may be: the adapters that are now in the folder of option ``adapters``."""
    if config.adapters is None:
        return []
    files = Path(config.adapters).glob(f"*/{_ADAPTER}")
    names = [file.parent.name for file in files]
    return sorted(name for name in names if not name.startswith("."))


def check_adapter(name: str, config: EngineConfig) -> None:
    """Raise InvalidArgumentError if the model has no adapter of that name."""
    if len(name.encode("utf-8", "surrogatepass")) > _MOST_NAME_BYTES:
        raise InvalidArgumentError.of("lora_name", name, f"of at most {_MOST_NAME_BYTES} bytes")
    bound = "the name of an adapter of this model"
    if not _is_folder_name(name):
        raise InvalidArgumentError.of("lora_name", name, bound)
    root = config.adapters
    # Not Path.is_file, which would raise for what may not be read.
    if root is None or not os.path.isfile(Path(root, name, _ADAPTER)):
        known = nearest(name, adapter_names(config))
        raise InvalidArgumentError.of("lora_name", name, f"{bound}{known}")


def _is_folder_name(name: str) -> bool:
    """Whether it is the plain name of a folder: no path that leads elsewhere, and not hidden."""
    if not name or name.startswith(".") or "\0" in name:
        return False
    return Path(name).name == name


def check_prompt_size(field: str, size: int, config: EngineConfig, info: ModelInfo) -> None:
    """Raise InvalidArgumentError if a prompt of ``size`` bytes is too large."""
    limit = max_prompt_bytes(config, info)
    if size > limit:
        raise InvalidArgumentError(
            f"{field} has {size:,} bytes, but at most {limit:,} are taken (max_prompt_bytes)"
        )


def _check_length(num_prompt: int, max_tokens: int, max_model_len: int) -> None:
    total = num_prompt + max_tokens
    if total > max_model_len:
        raise InvalidArgumentError(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together "
            f"{total}, but the model's context holds {max_model_len}"
        )


def _check_answer(num_prompt: int, params: SamplingParams, limit: int) -> None:
    """Raise InvalidArgumentError if an answer that is not streamed could have too many entries."""
    entries = params.n * params.max_tokens * _entries_per_token(params)
    entries += _prompt_entries(params, num_prompt)
    if entries <= limit:
        return
    formula = (
        f"n {params.n} × max_tokens {params.max_tokens:,} × (logprobs {params.logprobs or 0} + 1)"
    )
    if params.prompt_logprobs is not None:
        formula += (
            f" + {num_prompt:,} prompt tokens × (prompt_logprobs {params.prompt_logprobs} + 1)"
        )
    raise InvalidArgumentError(
        f"{formula} is {entries:,}, but an answer that is not streamed may have at most "
        f"{limit:,} entries (max_answer_entries); set stream, or ask for less"
    )


def _check_satisfiable(params: SamplingParams, stop_ids: frozenset[int]) -> None:
    """Raise InvalidArgumentError if no token may be sampled first."""
    allowed = params.allowed_token_ids
    if allowed is None or params.min_tokens == 0:
        return
    if stop_ids.issuperset(allowed):
        raise InvalidArgumentError(
            f"allowed_token_ids holds only ids that end the sequence, but min_tokens is "
            f"{params.min_tokens}: no first token is left"
        )


def _encode_bad_words(
    words: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int
) -> list[list[int]]:
    """The ids of each word, as vLLM finds them. A word has other ids at the start of a text than
    after a space. The ids at the start are always forbidden. Those after a space are forbidden too
    if they are as many and begin with another id."""
    encoded: list[list[int]] = []
    for word in words:
        check_text("bad_words", word)
        at_start = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        if not at_start:
            raise InvalidArgumentError.of("bad_words", word, "words of at least one token")
        encoded.append(at_start)
        after_space = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if len(after_space) == len(at_start) and after_space[0] != at_start[0]:
            encoded.append(after_space)
    for ids in encoded:
        check_token_ids("bad_words", ids, vocab_size)
    return encoded

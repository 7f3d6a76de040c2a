"""The proof, at load, that transformers can generate from a module with a cache, and how. Called by
``load_opaque``.

A few dozen tokens are computed in one pass without a cache. Then they are computed over cache
objects: a prompt and single tokens, single tokens from the first on, and a prompt in several
chunks. Logits are compared by the median of the tokens of each piece, as in ``probe``. If only the
chunks go wrong, prompts are never cut: many modules with a state take one token or a whole prompt.
"""

import logging
import time
from typing import Any

import torch
from torch import Tensor

from jitney.errors import CheckpointError, first_line
from jitney.execution.machine import is_out_of_memory, synchronize
from jitney.execution.opaque import (
    CacheSizes,
    OpaqueCache,
    OpaqueModule,
    OpaqueTraits,
    cache_bytes,
)
from jitney.execution.probe import TOLERANCE, embedding_weight, token_distances
from jitney.execution.support import unservable
from jitney.messages import Chunking

_log = logging.getLogger(__name__)

_MOST_TOKENS = 48
"""More than the kernel of any short convolution, and so few that a large model computes them in
seconds."""
_SINGLE = 3
"""Tokens that are computed one by one."""
_CHUNKS = (17, 2, 1, 9, 4)
"""Tokens of the chunks that a prompt is cut into, and the rest is one more. Some are shorter than
the kernel of a short convolution, and some are longer."""
_SIDE_BY_SIDE = 8
"""Sequences whose steps are timed for :attr:`OpaqueTraits.slowdown`."""
_TIMES = 5


class _RefusedError(Exception):
    """The module cannot be served. Its text says why."""


@torch.inference_mode()
def try_opaque(opaque: OpaqueModule, max_model_len: int, weights: str) -> OpaqueTraits:
    """Prove that the module can be served, and measure its caches.

    Raises UnsupportedModelError if it cannot be; CheckpointError, naming the file ``weights``, if
    its logits are not finite; MemoryError if memory runs out."""
    try:
        trial = _Trial(opaque, min(max_model_len, _MOST_TOKENS))
        trial.find_how_caches_are_made()
        if not torch.isfinite(trial.expected).all():
            raise CheckpointError(
                f"{weights} gives logits that are not finite: values in it are corrupt, or too "
                "large for the dtype"
            )
        trial.check_single_tokens()
        chunking: Chunking = "any" if trial.can_be_cut() else "whole"
        return trial.measure(chunking)
    except CheckpointError:
        raise
    except _RefusedError as error:
        reason = str(error)
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        _log.error("a trial with transformers' own cache has failed", exc_info=error)
        what = "the log has the error" if isinstance(error, RuntimeError) else first_line(error)
        reason = f"transformers itself fails to generate from it with a cache ({what})"
    raise unservable(opaque.module.config.model_type, reason)


@torch.inference_mode()
def cache_sizes(opaque: OpaqueModule, max_model_len: int) -> CacheSizes | None:
    """The sizes of the caches of a module on the meta device; None if it cannot run there."""
    try:
        return _measure_sizes(opaque, _token_ids(opaque, min(max_model_len, _MOST_TOKENS)))
    except Exception:  # many classes, by what the module asks of the values of its tensors
        _log.debug("a module does not run on the meta device", exc_info=True)
        return None


def _token_ids(opaque: OpaqueModule, count: int) -> Tensor:
    """Fixed token ids, spread over the vocabulary, as in ``probe.probe_ids``."""
    weight = embedding_weight(opaque.module)
    size = len(weight)
    return (torch.arange(count, device=weight.device) * 7919 + size // 3) % size


def _measure_sizes(opaque: OpaqueModule, ids: Tensor) -> CacheSizes:
    """The sizes of a cache, from one of few tokens and one of many."""
    few = max(1, len(ids) // 3)
    many = len(ids)
    bytes_of_few = cache_bytes(opaque.compute(ids[:few], 0, None).cache)
    bytes_of_many = cache_bytes(opaque.compute(ids, 0, None).cache)
    of_token = 0
    if many > few:
        of_token = -(-max(0, bytes_of_many - bytes_of_few) // (many - few))
    return CacheSizes(of_token, fixed=max(0, bytes_of_many - of_token * many))


class _Trial:
    """The passes of one trial, over the same tokens."""

    def __init__(self, opaque: OpaqueModule, num_tokens: int) -> None:
        self._opaque = opaque
        self._ids = _token_ids(opaque, num_tokens)
        self._tolerance = TOLERANCE[embedding_weight(opaque.module).dtype]
        self.expected = self._expect()
        """Logits [tokens, vocabulary]: what every other way of computing the tokens must give."""

    def _expect(self) -> Tensor:
        expected = self._opaque.compute_without_cache(self._ids)
        if expected.shape[0] != len(self._ids):
            raise _RefusedError("it does not give logits of every token")
        return expected

    def find_how_caches_are_made(self) -> None:
        """Raise _RefusedError if there are no caches."""
        options = (True, False) if self._opaque.takes_caches else ()
        for makes_caches in options:
            self._opaque.makes_caches = makes_caches
            cache = self._opaque.compute(self._ids[:1], 0, None).cache
            if cache is not None and cache_bytes(cache) > 0:
                return
        raise _RefusedError(
            "transformers keeps no cache for it, and computes all tokens again for each new one"
        )

    def check_single_tokens(self) -> None:
        """A prompt of one token, and a longer one, with single tokens behind each. If they have
        other logits than without a cache, transformers' ``generate`` must have these, too; else
        raises _RefusedError."""
        longest = max(1, len(self._ids) - _SINGLE)
        for prompt in {1, longest}:
            distance = self._distance([prompt] + [1] * min(_SINGLE, len(self._ids) - prompt))
            if distance <= self._tolerance:
                continue
            text = (
                f"with its own cache transformers computes logits that are {distance:.2g} of their "
                "spread away from those without"
            )
            if not self._is_like_generate(self._ids[:prompt]):
                raise _RefusedError(text)
            _log.warning("tokens are those of transformers' generate, but %s", text)

    def _is_like_generate(self, prompt: Tensor) -> bool:
        """Whether a prompt and the tokens that transformers' ``generate`` makes of it have the
        logits that it has for them."""
        count = min(_SINGLE, len(self._ids) - len(prompt))
        module: Any = self._opaque.module  # its ``generate`` comes from a class beside the module's
        made = module.generate(
            prompt.unsqueeze(0),
            attention_mask=torch.ones_like(prompt).unsqueeze(0),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = made.sequences[0]
        logits = []
        cache: OpaqueCache = None
        start = 0
        for end in range(len(prompt), len(prompt) + count):
            computed = self._opaque.compute(tokens[start:end], start, cache)
            cache = computed.cache
            logits.append(computed.logits[-1:])
            start = end
        distances = token_distances(torch.cat(logits), torch.cat(made.logits))
        return bool(distances.median() <= self._tolerance)

    def can_be_cut(self) -> bool:
        """Whether a prompt in chunks has the logits that it has in one piece."""
        pieces = []
        left = len(self._ids) - 1
        for size in (*_CHUNKS, left):
            pieces.append(min(size, left))
            left -= pieces[-1]
        pieces = [size for size in pieces if size > 0]
        try:
            return self._distance([*pieces, 1]) <= self._tolerance
        except Exception as error:  # many classes, by what the module cannot do
            if is_out_of_memory(error):
                raise
            return False

    def _distance(self, pieces: list[int]) -> float:
        """Compute tokens in pieces of these sizes, one after the other. Returns how far their
        logits are from those expected: the largest of the medians of single tokens together, and of
        each longer piece."""
        distances = []
        singles = []
        cache: OpaqueCache = None
        start = 0
        for size in pieces:
            end = start + size
            computed = self._opaque.compute(self._ids[start:end], start, cache, size)
            if computed.cache is None or computed.logits.shape[0] != size:
                raise _RefusedError("it does not give a cache, and logits of all tokens, each time")
            cache = computed.cache
            found = token_distances(computed.logits, self.expected[start:end])
            if size == 1:
                singles.append(found)
            else:
                distances.append(found.median())
            start = end
        if singles:
            distances.append(torch.cat(singles).median())
        return float(torch.stack(distances).max())

    def measure(self, chunking: Chunking) -> OpaqueTraits:
        """The sizes of caches, and the time of steps."""
        sizes = _measure_sizes(self._opaque, self._ids)
        return OpaqueTraits(
            chunking=chunking,
            vocab_size=self.expected.shape[1],
            token_bytes=sizes.of_token,
            fixed_bytes=sizes.fixed,
            slowdown=self._slowdown(),
        )

    def _slowdown(self) -> float:
        together = self._ids[: min(_SIDE_BY_SIDE, len(self._ids) - 1)]
        if not len(together):
            return 1.0  # the context has one token
        cache = self._opaque.compute(together, 0, None).cache
        alone_s = []
        together_s = []
        for _ in range(_TIMES):
            began = self._now()
            self._opaque.compute(together, 0, None)
            together_s.append(self._now() - began)
            own = self._opaque.copy(cache)
            began = self._now()
            self._opaque.compute(together[:1], len(together), own)
            alone_s.append(self._now() - began)
        return len(together) * min(alone_s) / min(together_s)

    def _now(self) -> float:
        synchronize(self._ids.device)
        return time.perf_counter()

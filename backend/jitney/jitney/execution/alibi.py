"""ALiBi (https://arxiv.org/abs/2108.12409) for attention functions that do not know it.

A head's score becomes larger by ``slope * (key's position - query's position)``. The query's part
is the same for all keys, so a softmax does not depend on it. What is left, ``slope * key's
position``, is a product of something of the query's head and something of the key: it is put into
further elements of both. Any attention function then adds it to the score.

16-bit caches hold 8 bits of a number. So a position is split into digits of 7 bits, and the factor
of the query into as many bfloat16 as make a float32; each pair of them has an element.
"""

import torch
from torch import Tensor
from torch.nn import functional

from jitney.execution.attention import AttentionMetadata
from jitney.execution.interface import AttentionCall, AttentionFunction, LayerCache

ALIBI_ELEMENTS = 16
"""How many elements are added to each head."""
_DIGITS = 3
_DIGIT = 1 << 7
_PIECES = 3


class AlibiAttention:
    """Takes calls with slopes, for an attention function of heads with ALIBI_ELEMENTS more; see
    :class:`interface.AttentionFunction`."""

    def __init__(self, attend: AttentionFunction) -> None:
        self.name = attend.name
        self._attend = attend

    def __call__(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
        """See :class:`interface.AttentionFunction`."""
        plan = (type(self), call.key.dtype)
        digits = meta.plans.get(plan)
        if digits is None:
            digits = _digits_of(meta.positions, call.key.dtype)
            meta.plans[plan] = digits
        assert isinstance(digits, Tensor)
        assert call.slopes is not None
        size = call.value.shape[-1]
        factors = _factors_of(call.slopes / call.scale, call.query.dtype)
        tokens, kv_heads, _ = call.key.shape
        wider = call._replace(
            query=torch.cat((call.query, factors.expand(tokens, -1, -1)), dim=-1),
            key=torch.cat((call.key, digits[:, None].expand(-1, kv_heads, -1)), dim=-1),
            value=functional.pad(call.value, (0, ALIBI_ELEMENTS)),
            slopes=None,
        )
        own_cache = cache._replace(attend=self._attend)
        return self._attend(wider, own_cache, meta)[..., :size]


def _digits_of(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Of the keys at ``positions`` [T]: [T, ALIBI_ELEMENTS]. Element ``digit * _PIECES + piece`` is
    that digit's share of the position."""
    shares = []
    for digit in range(_DIGITS):
        weight = _DIGIT**digit
        share = positions // weight % _DIGIT * weight
        shares += [share] * _PIECES
    return _filled_up(torch.stack(shares, dim=-1).to(dtype))


def _factors_of(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Of the queries' heads, float32 ``factors`` [heads]: [heads, ALIBI_ELEMENTS]. Element ``digit
    * _PIECES + piece`` is that piece of the factor; the pieces' sum is the factor."""
    pieces = []
    rest = factors
    for _ in range(_PIECES):
        piece = rest.bfloat16().float()
        pieces.append(piece)
        rest = rest - piece
    return _filled_up(torch.stack(pieces * _DIGITS, dim=-1).to(dtype))


def _filled_up(x: Tensor) -> Tensor:
    """``x`` with zeros up to ALIBI_ELEMENTS in its last dimension."""
    return functional.pad(x, (0, ALIBI_ELEMENTS - x.shape[-1]))

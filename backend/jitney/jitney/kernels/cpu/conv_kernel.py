"""The short convolution of state layers, as a Numba kernel: each channel by itself, over the last
few tokens (``taps`` of them).

A slot holds the inputs of the last ``taps`` tokens, [taps, channels], the oldest first, in the
dtype of the model. An input is x or, with a gate, the product of two parts of a token's row; then a
third part multiplies the result (LFM2)::

    | before | after | x |        out = after * conv(before * x)

Loops: items of some channels of a row, vectors of 16 channels, tokens, taps.

Called by ``state_layer``.
"""

from jitney.kernels.cpu.compiled import reader, record
from jitney.kernels.cpu.emit import F32_BYTES, LANES
from jitney.kernels.cpu.simd import (
    ZERO,
    element_bytes,
    fetch_add,
    fma,
    inner,
    load,
    load_as,
    rounded_as,
    silu,
    splat,
    store_as,
)
from jitney.kernels.cpu.state_records import ROW_BYTES, StateCall, read_row

CHANNELS_PER_ITEM = 256
"""At most."""


@record
class ConvCall(StateCall):
    """The channels of x lie side by side, and so do those of the result."""

    channels: int
    """A multiple of 16."""
    taps: int
    weight: int
    """Address of float32 [taps, channels]. The last tap is that of the token itself."""
    bias: int
    """Address of float32 [channels]. 0: there is none."""
    silu: int
    """1: the result is silu(conv)."""
    gated: int
    """1: there are ``before`` and ``after``."""
    before: int
    """Bytes from x to the factor of the inputs, in each row."""
    after: int
    """The same of the factor of the result."""


read_conv = reader(ConvCall)


@inner
def conv_input(tag, call, token, channel):
    """The inputs of 16 channels, as a slot holds them."""
    address = call.x + token * call.x_stride + channel * element_bytes(tag)
    value = load_as(tag, address)
    if call.gated != 0:
        value = rounded_as(tag, value * load_as(tag, address + call.before))
    return value


@inner
def past_input(tag, call, row, state, index, channel):
    """The same of a token before the row's first one: ``index`` counts the tokens of the slot."""
    if row.is_new != 0:
        return splat(ZERO)
    return load_as(tag, state + (index * call.channels + channel) * element_bytes(tag))


@inner
def any_input(tag, call, row, state, token, channel):
    """The same of the row's token with this number, which is negative before its first one."""
    if token >= 0:
        return conv_input(tag, call, row.first + token, channel)
    return past_input(tag, call, row, state, call.taps + token, channel)


@inner
def conv_channels(tag, call, row, state, channel):
    """16 channels of all tokens of a row, and then of its slot."""
    size = element_bytes(tag)
    for t in range(row.num_tokens):
        total = splat(ZERO)
        if call.bias != 0:
            total = load(call.bias + channel * F32_BYTES)
        for tap in range(call.taps):
            value = any_input(tag, call, row, state, t - call.taps + 1 + tap, channel)
            weight = load(call.weight + (tap * call.channels + channel) * F32_BYTES)
            total = fma(value, weight, total)
        if call.silu != 0:
            total = silu(total)
        if call.gated != 0:
            address = call.x + (row.first + t) * call.x_stride + channel * size
            total = total * load_as(tag, address + call.after)
        store_as(tag, call.out + (row.first + t) * call.out_stride + channel * size, total)
    # The new inputs come from tokens of the row, or from behind them in the slot: so none is
    # overwritten before it is read.
    for index in range(call.taps):
        token = row.num_tokens - call.taps + index
        value = any_input(tag, call, row, state, token, channel)
        store_as(tag, state + (index * call.channels + channel) * size, value)


@inner
def conv_body(tag, arguments):
    """See the module."""
    call = read_conv(arguments)
    while True:
        item = fetch_add(arguments)  # the counter is the first field
        if item >= call.count:
            return
        row = read_row(call.rows + item // call.items_per_row * ROW_BYTES)
        state = call.state + row.slot * call.slot_stride
        channel = item % call.items_per_row * CHANNELS_PER_ITEM
        end = min(channel + CHANNELS_PER_ITEM, call.channels)
        while channel < end:
            conv_channels(tag, call, row, state, channel)
            channel += LANES

"""A Batch in, a step under way: the runner of GPUs.

:meth:`GpuRunner.launch` queues a step on the device and returns; its tokens stay there as the next
step's inputs, so that the engine can launch that one before :meth:`PendingStep.wait` has brought
them to the host. Everything is launched on one stream, in order. Decode steps run as CUDA graphs
where the device has them (``graphs``); steps with prompts run kernel by kernel.

It runs as well on a CPU where the kernels are interpreted, without graphs and without overlap of
anything: that is how it is tested without a GPU.
"""

import contextlib
import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from jitney.config import EngineConfig
from jitney.errors import DeviceLostError
from jitney.execution.gpu.device import Device
from jitney.execution.gpu.graphs import DecodeGraphs, GraphKey, padded_sizes
from jitney.execution.gpu.sampler import DeviceSampler, LaunchedSamples
from jitney.execution.gpu.step import Shape, StepInputs
from jitney.execution.interface import LayerCache, PagedStep, forward
from jitney.execution.models import LoadedModel
from jitney.execution.sampler import prompt_logprobs
from jitney.execution.wanted import Wanted, row_output
from jitney.request import Batch, Logprob, ModelInfo, Row, RowOutput, StepOutput

# Logits of one pass. A step with prompt logprobs that wants more is computed several times.
_LOGITS_FLOATS = 1 << 28

_PromptLogprobs = dict[int, list[list[Logprob]]]  # number of a row -> per position


class PendingStep:
    """A step on its way; see ``engine.Pending``."""

    def __init__(
        self,
        runner: "GpuRunner",
        rows: list[Row],
        samples: list[LaunchedSamples],
        prompt: _PromptLogprobs,
    ) -> None:
        self._runner = runner
        self._rows = rows
        self._samples = samples
        self._prompt = prompt
        self._plain = not prompt and all(
            len(row.sample) == 1 and row.params.logprobs is None for row in rows
        )

    def wait(self) -> StepOutput:
        """The step's output, once the device has it. Raises whatever the device raises."""
        try:
            sampled = [each for samples in self._samples for each in samples.wait()]
        except BaseException:
            self._runner.recover()
            raise
        if self._plain:  # a token for each row and nothing else
            return StepOutput(
                rows=[
                    RowOutput([each.token_id])
                    if each.error is None
                    else RowOutput([], error=each.error)
                    for each in sampled
                ]
            )
        outputs: list[RowOutput] = []
        done = 0
        for row in self._rows:
            count = len(row.sample)
            outputs.append(row_output(row, sampled[done : done + count]))
            done += count
        for r, entries in self._prompt.items():
            if outputs[r].error is None:
                outputs[r].prompt_logprobs = entries
        return StepOutput(rows=outputs)


class GpuRunner:
    """Owns the module, the KV cache and the device. Not thread-safe: one thread calls it."""

    info: ModelInfo

    def __init__(
        self,
        model: LoadedModel,
        caches: list[LayerCache],
        info: ModelInfo,
        config: EngineConfig,
        device: Device,
    ) -> None:
        self.info = info
        self._module = model.module
        self._caches = caches
        self._device = device
        self._attends: list[Any] = list({id(each.attend): each.attend for each in caches}.values())
        max_rows = min(config.max_num_seqs, info.max_num_batched_tokens)
        self._inputs = StepInputs(
            device,
            max_rows=max_rows,
            max_tokens=info.max_num_batched_tokens,
            # One more than any context needs: a step launched before an end was known may have it.
            max_blocks=-(-info.max_model_len // info.block_size) + 1,
            block_size=info.block_size,
            last_block=info.num_blocks - 1,
        )
        never = config.cuda_graphs == "never"
        sizes = [] if never else padded_sizes(config.cuda_graph_sizes, max_rows)
        self._graphs = DecodeGraphs(device, sizes, info.max_model_len, self._plan)
        self._most_padded = max(sizes, default=0)
        self._logits: Tensor | None = None  # of graphs: [most padded rows, vocabulary]
        self._sampler: DeviceSampler | None = None  # made for the width of the first logits
        self._dtype: torch.dtype | None = None  # theirs
        self._most_sampled = max(max_rows, _LOGITS_FLOATS // info.vocab_size)
        self._sampled: Tensor | None = None  # of the step launched last, by place

    # ------------------------------------------------------------------ the engine's calls

    def execute(self, batch: Batch) -> StepOutput:
        """Compute one step: copy blocks, write the new K and V, sample.

        Raises whatever the device raises; then no row of the batch may be taken as computed.
        """
        return self.launch(batch).wait()

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step behind those before it. Returns before it is over, unless a row wants
        prompt logprobs; if it raises, nothing is under way."""
        self._device.enter()
        with torch.inference_mode():
            try:
                return self._launch(batch)
            except BaseException:
                self.recover()
                raise

    def recover(self) -> None:
        """A step failed: nothing may still run, and what the device holds of tables is unknown.
        Raises DeviceLostError if the device does not even answer."""
        self._inputs.forget()
        self._sampled = None
        try:
            self._device.synchronize()
        except Exception as fault:
            raise DeviceLostError("the device has failed for good") from fault

    def warm_up_sampler(self) -> None:
        """Compile what requests may ask of the sampler. After a first step: it gives the dtype."""
        assert self._sampler is not None
        assert self._dtype is not None
        self._device.enter()
        with torch.inference_mode():
            self._sampler.warm_up(self._dtype)

    def capture_graphs(self) -> int:
        """Capture all graphs that steps may need; returns their number. What the device's buffers
        hold meanwhile is a step that reads and writes nothing."""
        self._device.enter()
        with torch.inference_mode():
            for key in self.graph_keys:
                if not self._graphs.usable:  # the first could not be captured
                    break
                self._inputs.clear()
                self._graphs.run(key, key.limit, self._decode)
            self._device.synchronize()
        return len(self._graphs)

    @property
    def graph_keys(self) -> list[GraphKey]:
        """All graphs that steps may need."""
        return self._graphs.keys()

    def close(self) -> None:
        """Give the memory of module, cache and graphs back. The runner is of no use afterwards."""
        with contextlib.suppress(Exception):  # after a fault of the device, say
            self._device.synchronize()
        self._graphs.clear()
        self._caches = []
        self._attends = []
        self._logits = self._sampled = None
        del self._module, self._inputs, self._sampler
        self._device.release()

    # ------------------------------------------------------------------ a step

    def _launch(self, batch: Batch) -> PendingStep:
        rows = list(batch.rows)
        lengths = [len(row.token_ids) for row in rows]
        starts = [row.start for row in rows]
        wanted = None
        if sum(lengths) != len(rows) or _want_prompt_logprobs(rows):
            wanted = Wanted(rows)
        pairs = [(row, index) for row in rows for index in row.sample]
        sources = _sources(rows, pairs, wanted)
        self._inputs.load(
            rows,
            lengths,
            starts,
            wanted=wanted.tokens or [0] if wanted is not None else (),
            sources=sources or (),
            copies=batch.copies,
        )
        if batch.copies:
            self._copy_blocks(self._inputs.copies())
        if not rows:
            return PendingStep(self, rows, [], {})
        shape = Shape(
            len(rows),
            sum(lengths),
            max(lengths),
            max(map(operator.add, starts, lengths)),
        )
        prompt: _PromptLogprobs = {}
        if wanted is None:
            logits = self._run_decode(shape)
        elif wanted.prompt:
            logits, prompt = self._run_prompts(rows, shape, wanted)
        else:
            logits = self._run_mixed(shape)
        samples = self._sample(logits, pairs, sources is None)
        return PendingStep(self, rows, samples, prompt)

    def _sample(
        self, logits: Tensor, pairs: list[tuple[Row, int]], direct: bool
    ) -> list[LaunchedSamples]:
        """Draw for all pairs; ``direct``: pair i's logits are at i. In slices: prompts of n > 1
        that end in one step can give a hundred times as many sequences as rows."""
        if self._sampler is None:
            self._sampler = DeviceSampler(self._device.torch_device, logits.shape[1])
            self._dtype = logits.dtype
        samples = []
        for begin in range(0, len(pairs), self._most_sampled):
            part = slice(begin, min(begin + self._most_sampled, len(pairs)))
            chosen = logits[part] if direct else logits[self._inputs.sources()[part]]
            samples.append(self._sampler.launch(chosen, pairs[part]))
        drawn = [each.token_ids for each in samples]
        self._sampled = torch.cat(drawn) if len(drawn) > 1 else drawn[0] if drawn else None
        return samples

    def _run_decode(self, shape: Shape) -> Tensor:
        """A token each: logits [R or more, vocabulary]."""
        key = self._graphs.key(shape.num_rows, shape.longest_context)
        if key is None:
            self._inputs.prepare(shape, shape.num_rows, self._sampled)
            return self._forward(shape, self._inputs.every_row[: shape.num_rows])
        self._inputs.prepare(shape, key.rows, self._sampled)
        self._graphs.run(key, shape.longest_context, self._decode)
        assert self._logits is not None
        return self._logits

    def _decode(self, key: GraphKey) -> None:
        """What a graph of this key consists of. Reads the static buffers, writes ``_logits``."""
        shape = Shape(key.rows, key.rows, 1, key.limit)
        logits = self._forward(shape, self._inputs.every_row[: key.rows])
        if self._logits is None:  # in the run before the first capture
            self._logits = logits.new_empty((self._most_padded, logits.shape[1]))
        # Graphs share the memory of what they compute: this is the one thing that outlives them.
        self._logits[: key.rows].copy_(logits)

    def _run_mixed(self, shape: Shape) -> Tensor:
        """Prompts and decodes: logits of the wanted tokens."""
        self._inputs.prepare(shape, shape.num_rows, self._sampled)
        return self._forward(shape, self._inputs.wanted())

    def _run_prompts(
        self, rows: list[Row], shape: Shape, wanted: Wanted
    ) -> tuple[Tensor, _PromptLogprobs]:
        """A step with prompt logprobs: the logits of the places that are sampled from, and those.

        As many times as its logits do not fit at once: a step writes the same K and V again.
        """
        self._inputs.prepare(shape, shape.num_rows, self._sampled)
        tokens = self._inputs.wanted()
        size = max(1, _LOGITS_FLOATS // self.info.vocab_size)
        prompt: _PromptLogprobs = {r: [] for r in wanted.prompt}
        kept: list[Tensor] = []
        for begin in range(0, len(wanted.tokens), size):
            logits = self._forward(shape, tokens[begin : begin + size])
            end = begin + logits.shape[0]
            for r, (first, targets) in wanted.prompt.items():
                low, high = max(first, begin), min(first + len(targets), end)
                if low < high:
                    k = rows[r].params.prompt_logprobs
                    assert k is not None
                    part = logits[low - begin : high - begin]
                    prompt[r] += prompt_logprobs(part, targets[low - first : high - first], k)
            places = [place - begin for place in _distinct(wanted) if begin <= place < end]
            if places or not kept:
                kept.append(logits[torch.tensor(places, dtype=torch.int64, device=logits.device)])
        return torch.cat(kept), prompt

    def _forward(self, shape: Shape, wanted: Tensor) -> Tensor:
        inputs = self._inputs
        return forward(
            self._module,
            inputs.ids[: shape.num_tokens],
            inputs.positions[: shape.num_tokens],
            wanted,
            PagedStep(self._caches, inputs.metadata(shape)),
        )

    def _copy_blocks(self, copies: Tensor) -> None:
        """All sources are read before any destination is written."""
        source, destination = copies
        for cache in self._caches:
            for values in (cache.keys, cache.values):
                if values.itemsize == 1:  # indexing knows no 8-bit floats
                    values = values.view(torch.uint8)
                values[destination] = values[source]

    def _plan(self, rows: int, longest_context: int) -> Hashable:
        """What the layers' attention bakes into the launches of a decode step."""
        return tuple(attend.plan(rows, rows, 1, longest_context) for attend in self._attends)


def _want_prompt_logprobs(rows: list[Row]) -> bool:
    """Whether any row computes prompt tokens and is to say how likely they were."""
    for row in rows:
        if row.params.prompt_logprobs is not None and row.start + 1 < len(row.prompt):
            return True
    return False


def _distinct(wanted: Wanted) -> list[int]:
    """Places among the wanted logits that are sampled from."""
    return sorted(set(wanted.sampled_of_pairs))


def _sources(
    rows: list[Row], pairs: list[tuple[Row, int]], wanted: Wanted | None
) -> list[int] | None:
    """For each pair the place of its logits among those computed; None: pair i's are at i."""
    if wanted is not None:
        places = wanted.sampled_of_pairs
        if wanted.prompt:  # then only these are kept
            rank = {place: i for i, place in enumerate(_distinct(wanted))}
            places = [rank[place] for place in places]
        return None if places == list(range(len(pairs))) else places
    if [len(row.sample) for row in rows].count(1) == len(rows):
        return None
    return [r for r, row in enumerate(rows) for _ in row.sample]

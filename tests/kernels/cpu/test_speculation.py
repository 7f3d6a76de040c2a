"""Option ``speculation`` on a real model: no bit of any stream depends on it."""

import random

import msgspec
import pytest
import torch
from jitney.config import EngineConfig
from jitney.core.policy.prices import Prices
from jitney.engine.assemble import grammar_compiler, load_runner
from jitney.engine.engine import Engine
from jitney.errors import ConfigError
from jitney.execution import draft
from jitney.execution.draft import _added_tokens
from jitney.execution.sampler import sample
from jitney.messages import Emitted, Finished, Submit, Tokens
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from jitney.text.tokenizer import read_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.prophet import Prophet
from tests.tiny_models import VOCAB_SIZE, make_checkpoint, make_head

pytest.importorskip("numba")

Bits = dict[tuple[int, int], list[tuple[int, str]]]
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0}
WISHES: list[dict] = [
    GREEDY,
    SAMPLED,
    {**SAMPLED, "n": 3, "top_p": 0.9},
    {**SAMPLED, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {**GREEDY, "presence_penalty": 0.5, "min_tokens": 9, "stop_ids": frozenset(range(3, 40))},
    {**SAMPLED, "bad_words_ids": [[5], [7, 8]], "top_k": 12},
    {**SAMPLED, "grammar": r"[a-d]{3}( [a-z]{2,9})*", "logprobs": None},
    {**GREEDY, "grammar": r"[a-d]{3}( [a-z]{2,9})*"},
    {**SAMPLED, "grammar": "[a-d]{9}", "logprobs": None, "ignore_eos": True},
    {**GREEDY, "grammar": "[a-d]{9}", "min_tokens": 12, "stop_ids": frozenset({2})},
]


def submits() -> list[Submit]:
    """Three of each wish; prompts that repeat themselves, of several lengths."""
    drawn = torch.Generator().manual_seed(0)
    made = []
    for key, wish in enumerate(WISHES * 3):
        piece = torch.randint(3, VOCAB_SIZE, (5 + key,), generator=drawn).tolist()
        params = {"max_tokens": 24, "logprobs": 1, "seed": key, **wish}
        of_submit = {name: params.pop(name) for name in Submit.__struct_fields__ if name in params}
        made.append(
            Submit(
                key=key,
                prompt=piece * (1 + key % 4),
                params=SamplingParams(**params),
                arrival=float(key),
                **of_submit,
            )
        )
    return made


class Run:
    """What an engine gives for some requests. ``streams`` has a Prophet draft, right as a rule;
    and every draft is taken, as it is with ``eager``."""

    def __init__(self, config, runner, compiler, asked, streams=None, eager=False) -> None:
        engine = Engine(config, runner, clock=lambda: 0.0, compile_grammar=compiler)
        if streams is not None or eager:
            engine.scheduler.policies.drafts._prices = lambda some: Prices(0.0)
        if streams is not None:
            chance = random.Random(3)
            engine.scheduler.policies.drafts.drafter = drafter = Prophet(
                lambda: chance.random() < 0.8
            )
            drafter.streams = streams
        self.bits: Bits = {}
        self.streams: dict[tuple[int, int], list[int]] = {}
        self.ends, self.drafted, self.accepted, self.preemptions = 0, 0, 0, 0
        for one in asked:
            engine.send(one)
        while engine.has_work:
            report = engine.step()
            engine.scheduler.check_integrity()
            self.drafted += report.stats.draft_tokens
            self.accepted += report.stats.accepted_tokens
            self.preemptions += report.stats.preemptions
            for event in report.events:
                self._take(event)
        assert self.ends == len(asked)

    def _take(self, event) -> None:
        self.ends += isinstance(event, Finished)
        if not isinstance(event, Tokens):
            return
        self.streams.setdefault((event.key, event.index), []).extend(event.ids)
        entries = [[]] * len(event.ids) if event.logprobs is None else event.logprobs
        self.bits.setdefault((event.key, event.index), []).extend(
            (id, " ".join(f"{one.token_id} {one.logprob.hex()}" for one in some))
            for id, some in zip(event.ids, entries, strict=True)
        )


def load(folder, **more: object) -> tuple[EngineConfig, object, object]:
    path = make_checkpoint(folder, "llama", tokenizer=True)
    config = make_config({
        "model": str(path), "device": "cpu", "dtype": "bfloat16", "batch_invariant": True,
        "kv_cache_bytes": 1 << 20, "watermark": 0.0, **more,
    })  # fmt: skip
    runner = load_runner(config)
    return config, runner, grammar_compiler(read_tokenizer(path), runner.info)


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"quantization": "int8", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({"quantization": "int4"}, marks=pytest.mark.slow),  # to compile
    ],
    ids=str,
)
def test_streams_are_bitwise_the_same(tmp_path, more: dict[str, object]) -> None:
    """Without drafts, with n-grams, with a drafter that is right as a rule, where blocks are short,
    and resumed in the middle."""
    config, runner, compiler = load(tmp_path, **more)
    asked, compiled = submits(), compiled_by(compiler)
    off = Run(config, runner, compiled.__getitem__, asked)
    speculates = make_config({**msgspec.structs.asdict(config), "speculation": {"max_drafts": 5}})
    ngrams = Run(speculates, runner, compiled.__getitem__, asked)
    assert ngrams.bits == off.bits
    right = Run(speculates, runner, compiled.__getitem__, asked, off.streams)
    assert right.bits == off.bits
    assert 0 < ngrams.accepted + right.accepted < right.drafted
    runner.info = msgspec.structs.replace(runner.info, num_blocks=24)
    short = Run(speculates, runner, compiled.__getitem__, asked, off.streams)
    assert short.preemptions > 0
    assert short.bits == off.bits
    resumed = [resume(one, off) for one in asked]
    rest = Run(speculates, runner, compiled.__getitem__, resumed, off.streams)
    for place, bits in off.bits.items():
        emitted = resumed[place[0]].emitted[place[1]].ids
        assert rest.bits[place] == bits[len(emitted) :]
    runner.close()


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_a_draft_model(tmp_path, name: str) -> None:
    """The model itself, which is nearly always right, and one that knows nothing of it: the same
    bits. Blocks that are shared, copied and found by their hash have the draft model's K and V."""
    draft = make_checkpoint(tmp_path / "draft", name, tokenizer=True)
    speculation = {"drafter": "draft_model", "model": str(draft), "max_drafts": 3}
    speculates, runner, compiler = load(tmp_path / "m", speculation=speculation)
    config = msgspec.structs.replace(speculates, speculation=None)
    asked, compiled = submits(), compiled_by(compiler)
    off = Run(config, runner, compiled.__getitem__, asked)
    on = Run(speculates, runner, compiled.__getitem__, asked, eager=True)
    assert on.bits == off.bits
    assert on.drafted > 100
    runner.info = msgspec.structs.replace(runner.info, num_blocks=24)
    short = Run(speculates, runner, compiled.__getitem__, asked, eager=True)
    assert short.preemptions > 0
    assert short.bits == off.bits
    plain = [one for one in asked if not one.grammar]
    some = Run(speculates, runner, compiled.__getitem__, plain, eager=True)
    assert (some.accepted > 0.9 * some.drafted) == (name == "llama")
    runner.close()


@pytest.mark.slow  # how a drafter follows its model: test_draft.py, quickly
@pytest.mark.parametrize("more", [{}, {"fuse": False, "batch_invariant": False}], ids=str)
def test_a_head(tmp_path, monkeypatch, more: dict[str, object]) -> None:
    """The same bits; and what it proposes is what transformers makes of the same two modules, drawn
    by the numbers that the model will draw with."""
    drawn_at: list[int] = []

    def note(logits, pairs):
        drawn_at.extend(row.end for row, _ in pairs)
        return sample(logits, pairs)

    monkeypatch.setattr(draft, "sample", note)
    target = make_checkpoint(tmp_path / "m", "llama", tokenizer=True)
    head = make_head(tmp_path / "head", target)
    speculation = {"drafter": "eagle", "model": head, "max_drafts": 3}
    options = {"dtype": "float32", "speculation": speculation, **more}
    speculates, runner, compiler = load(tmp_path / "m", **options)
    config = msgspec.structs.replace(speculates, speculation=None)
    asked, compiled = submits(), compiled_by(compiler)
    off = Run(config, runner, compiled.__getitem__, asked)
    follow, proposals = runner._draft.follow, []
    elsewhere = []  # asserted at the end: an exception here would only cost the step its drafts

    def watch(batch, meta, outputs) -> None:
        drawn_at.clear()
        follow(batch, meta, outputs)
        places: list[int] = []
        for row, output in zip(batch.rows, outputs(), strict=True):
            if output.proposal:
                known = row.prompt + row.output + _added_tokens(row, output)
                proposals.append((row.params, known, output.proposal))
                places.extend(range(len(known), len(known) + len(output.proposal)))
        if sorted(drawn_at) != sorted(places):
            elsewhere.append((sorted(drawn_at), sorted(places)))

    runner._draft.follow = watch
    on = Run(speculates, runner, compiled.__getitem__, asked, eager=True)
    assert elsewhere == [], "drawn as for another position"
    assert on.drafted > 300
    if not more:
        assert on.bits == off.bits
    kinds = [(each[0].temperature, each[0].presence_penalty) for each in proposals]
    plain = [each for each, kind in zip(proposals, kinds, strict=True) if kind == (0.0, 0.0)]
    weight = load_file(tmp_path / "head" / "hidden.safetensors")["hidden.weight"]
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (target, head)]
    assert len(plain) > 20
    for _, known, made in plain[:: len(plain) // 20]:
        assert made == proposed(*models, weight, known, len(made))
    runner.close()


@torch.inference_mode()
def proposed(target, head, weight, known: list[int], most: int) -> list[int]:
    """What a head proposes behind these tokens."""
    states = target.model(torch.tensor([known[:-1]])).last_hidden_state
    made: list[int] = []
    while len(made) < most:
        ids = torch.tensor([(known + made)[1:]])
        x = head.model.embed_tokens(ids) + states @ weight.T
        own = head.model(inputs_embeds=x).last_hidden_state
        made.append(int(head.lm_head(own[0, -1]).argmax()))
        states = torch.cat([states, own[:, -1:]], 1)
    return made


def test_a_draft_model_is_no_head(tmp_path) -> None:
    draft = make_checkpoint(tmp_path / "draft", "llama", tokenizer=True)
    with pytest.raises(ConfigError, match=r"a folder with hidden.weight \[\d+, \d+\]"):
        load(tmp_path / "m", speculation={"drafter": "eagle", "model": str(draft)})


def test_a_head_of_another_hidden_size_is_refused(tmp_path) -> None:
    head = make_checkpoint(tmp_path / "head", "llama", tokenizer=True, hidden_size=96)
    with pytest.raises(ConfigError, match=r"but must be a head of hidden size [0-9]+, not 96"):
        load(tmp_path / "m", speculation={"drafter": "eagle", "model": str(head)})


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path) -> None:
    draft = make_checkpoint(tmp_path / "draft", "llama")
    speculation = {"drafter": "draft_model", "model": str(draft)}
    with pytest.raises(
        ConfigError, match=r"speculation.model is .*, but must be a model of 320 tokens"
    ):
        load(tmp_path / "m", speculation=speculation)


@pytest.mark.parametrize("drafter", ["draft_model", "eagle"])
def test_a_draft_model_of_a_shorter_context_is_refused(tmp_path, drafter: str) -> None:
    """The error names no option that is not set, and both ways out."""
    draft = make_checkpoint(tmp_path / "draft", "llama", tokenizer=True, max_position_embeddings=64)
    message = (
        r"^option speculation\.model is .*, but must be a checkpoint made for at least 256 tokens, "
        "not 64; or set max_model_len to at most 64$"
    )
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "m", speculation={"drafter": drafter, "model": str(draft)})


def compiled_by(compiler) -> dict:
    """By text, the grammars of the wishes."""
    from llguidance import LLMatcher

    grammars = {wish["grammar"] for wish in WISHES if "grammar" in wish}
    return {text: compiler(LLMatcher.grammar_from_regex(text)) for text in grammars}


def resume(one: Submit, off: Run) -> Submit:
    """As an engine that takes another's place gets it."""
    emitted = []
    for index in range(one.params.n):
        stream = off.streams[one.key, index]
        emitted.append(Emitted(stream[: min(len(stream) - 1, 1 + (one.key + index) % 7)]))
    return msgspec.structs.replace(one, emitted=emitted, first_token=one.arrival)


def test_only_a_head_opens_the_model(tmp_path) -> None:
    """Without one, its embedding and its output layer are what they would be anyway."""
    draft = make_checkpoint(tmp_path / "draft", "llama", tokenizer=True)
    speculation = {"drafter": "draft_model", "model": str(draft)}
    _, runner, _ = load(tmp_path / "m", speculation=speculation)
    for model in (runner._model, runner._draft._model):
        assert type(model.module.get_input_embeddings()) is torch.nn.Embedding
        assert not model.module.get_output_embeddings()._forward_pre_hooks
    runner.close()

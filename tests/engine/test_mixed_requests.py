"""A thousand requests of every kind have the same bits with drafts and without, though engines are
killed meanwhile, blocks are short, adapters take turns and some clients go away."""

import os
import queue
import random
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from jitney.config import EngineConfig
from jitney.engine.supervisor import SupervisedEngine
from jitney.messages import (
    TERMINAL,
    Cancel,
    Cancelled,
    Event,
    Finish,
    Finished,
    Logprob,
    PromptLogprobs,
    StepReport,
    Submit,
    Tokens,
)
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.adapters.adapter_files import write_adapter
from tests.tiny_models import EOS_ID, make_checkpoint, make_head

pytest.importorskip("numba")

COUNT = 1000
OPEN = 64
"""Requests at once."""
VOCAB_SIZE = 320
RANKS = {"few": 2, "some": 5, "many": 16, "most": 32, "odd": 7}
GRAMMARS = (r"[a-d]{3}( [a-z]{2,9})*", "[a-d]{9}", r"(yes|no|perhaps)( and (yes|no|perhaps))*")
KILLS_AT = (0.15, 0.4, 0.7)
"""Shares of the requests that have ended."""
PATIENCE_S = 120.0


def make_submits(count: int = COUNT) -> list[Submit]:
    """Every wish is drawn on its own, so all of them meet in some request."""
    from llguidance import LLMatcher

    grammars = [LLMatcher.grammar_from_regex(text) for text in GRAMMARS]
    chance = random.Random(15)
    prefixes = [[chance.randrange(3, VOCAB_SIZE) for _ in range(48)] for _ in range(3)]

    def maybe(share: float, **wish: Any) -> dict[str, Any]:
        return wish if chance.random() < share else {}

    made = []
    for key in range(count):
        piece = [chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 12))]
        prompt = chance.choice(prefixes)[: chance.choice((0, 16, 33, 48))]
        params = {
            "seed": key,
            "max_tokens": chance.randint(1, 32),
            "temperature": chance.choice((0.0, 0.7, 1.0)),
            "logprobs": chance.choice((0, 1, 4)),
            **maybe(0.2, n=chance.randint(2, 4)),
            **maybe(0.2, top_p=0.9),
            **maybe(0.1, top_k=12),
            **maybe(0.1, min_p=0.05),
            **maybe(0.2, repetition_penalty=1.2),
            **maybe(0.1, frequency_penalty=0.3, presence_penalty=-0.2),
            **maybe(0.1, min_tokens=chance.randint(1, 9)),
            **maybe(0.1, logit_bias={5: 4.0, 9: -100.0}),
            **maybe(0.1, ignore_eos=True),
            **maybe(0.5, lora_name=chance.choice(list(RANKS))),
            **maybe(0.3, cache_salt=chance.choice(("one", "two"))),
            **maybe(0.1, priority=chance.randint(-2, 2)),
            **maybe(0.1, prompt_logprobs=1),
            **maybe(0.3, tier="live"),
        }
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        grammar = maybe(0.2, grammar=chance.choice(grammars))
        if grammar:  # some of them with forced tokens, which have no logprobs
            params |= maybe(0.5, logprobs=None)
        stops = set() if params.get("ignore_eos") else {EOS_ID}
        stops |= set(maybe(0.3, ids=range(3, 30)).get("ids", ()))
        made.append(
            Submit(
                key=key,
                prompt=prompt + piece * chance.randint(1, 4),
                params=SamplingParams(**params),
                arrival=float(key),
                stop_ids=frozenset(stops),
                bad_words_ids=maybe(0.1, ids=[[40], [7, 8]]).get("ids", []),
                **grammar,
            )
        )
    return made


def bits(entries: list[Logprob] | None) -> list[tuple[int, str, int]]:
    return [(each.token_id, each.logprob.hex(), each.rank) for each in entries or []]


class Clients:
    """Who sends the requests, and what each of them gets."""

    def __init__(self, asked: list[Submit], leave: bool = False) -> None:
        """With ``leave`` some cancel, and some end a sequence of theirs, after a few tokens."""
        self.streams: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
        """By key and index of a sequence: each token with its logprobs' bits, then the end."""
        self.prompts: dict[int, list[list[tuple[int, str, int]]]] = {}
        self.ends: dict[int, Event] = {}
        self.drafted = self.accepted = self.preemptions = self.loads = self.hits = 0
        self._waiting = asked[::-1]
        self._count = len(asked)
        chance = random.Random(3)
        keys = [submit.key for submit in asked]
        few = chance.sample(keys, len(keys) // 8 if leave else 0)
        self.leaves = {
            key: (chance.randrange(8), Finish(key, 0) if key % 2 else Cancel(key)) for key in few
        }
        """After so many tokens of its first sequence, what it sends then."""
        self.left: set[int] = set()
        """Who has."""

    def next_messages(self) -> list[Submit | Cancel | Finish]:
        """What is to be sent now."""
        messages: list[Submit | Cancel | Finish] = []
        submitted = self._count - len(self._waiting)
        while self._waiting and submitted - len(self.ends) < OPEN:
            messages.append(self._waiting.pop())
            submitted += 1
        waiting = {submit.key for submit in self._waiting}
        for key, (after, message) in list(self.leaves.items()):
            if key not in waiting and len(self.streams.get((key, 0), ())) >= after:
                messages.append(message)
                self.left.add(key)
                del self.leaves[key]
        return messages

    def read(self, report: StepReport) -> None:
        """Take what a step gave."""
        stats = report.stats
        self.drafted += stats.draft_tokens
        self.accepted += stats.accepted_tokens
        self.preemptions += stats.preemptions
        self.loads += stats.adapter_loads
        self.hits += stats.prefix_hit_tokens
        for event in report.events:
            if isinstance(event, TERMINAL):
                assert event.key not in self.ends, "a second end"
                self.ends[event.key] = event
            elif isinstance(event, PromptLogprobs):
                assert event.key not in self.prompts, "a prompt's logprobs a second time"
                self.prompts[event.key] = [bits(each) for each in event.logprobs]
            elif isinstance(event, Tokens):
                self._take(event)

    def _take(self, event: Tokens) -> None:
        stream = self.streams.setdefault((event.key, event.index), [])
        entries = event.logprobs or [[]] * len(event.ids)
        stream += [(id, bits(some)) for id, some in zip(event.ids, entries, strict=True)]
        if event.finish_reason is not None:
            logprob = event.cumulative_logprob
            end = None if logprob is None else logprob.hex()
            stream.append((event.finish_reason, event.stop_id, end))


def serve_alone(config: EngineConfig, asked: list[Submit]) -> Clients:
    """By an engine in this process that nobody kills."""
    from jitney.engine.assemble import prepare
    from jitney.engine.engine import Engine

    clients = Clients(asked)
    parts = prepare()(config, b"")
    engine = Engine(
        config,
        parts.runner,
        compile_grammar=parts.compile_grammar,
        adapters=parts.adapters,
    )
    while len(clients.ends) < len(asked):
        for message in clients.next_messages():
            engine.send(message)
        report = engine.step()
        if report is not None:
            clients.read(report)
    engine.scheduler.check_integrity()
    parts.runner.close()  # type: ignore[attr-defined]
    return clients


def serve_and_kill(config: EngineConfig, asked: list[Submit]) -> Clients:
    """By engines that are killed while they work."""
    clients = Clients(asked, leave=True)
    process = SupervisedEngine(config, "tests.engine.eager:loader")
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    process.start()
    thread = threading.Thread(target=process.run, args=(reports,), daemon=True)
    thread.start()
    kills = [share * len(asked) for share in KILLS_AT]
    try:
        while len(clients.ends) < len(asked):
            for message in clients.next_messages():
                process.send(message)
            clients.read(reports.get(timeout=PATIENCE_S))
            if kills and len(clients.ends) >= kills[0] and process.health.up:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                del kills[0]
    finally:
        process.stop()
        thread.join(PATIENCE_S)
    assert process.health.restarts == {"killed": len(KILLS_AT)}
    assert process.health.replayed_requests > OPEN
    assert process.health.replayed_tokens > OPEN
    return clients


class Compared(NamedTuple):
    tokens: int
    """That are the same, in streams that are so to their end."""
    differ: list[tuple[int, int]]
    """Key and index of the streams that are not the same."""


def compare(asked: list[Submit], served: Clients, right: Clients) -> Compared:
    """Streams of requests in two runs. Of a request whose client left, only what came before."""
    tokens = 0
    differ = []
    for submit in asked:
        key = submit.key
        left = key in served.left
        assert isinstance(right.ends[key], Finished), right.ends[key]
        assert isinstance(served.ends[key], (Finished, Cancelled)[: 1 + left]), served.ends[key]
        has_prompt = key in served.prompts or not left
        if has_prompt and served.prompts.get(key) != right.prompts.get(key):
            differ.append((key, -1))
        for index in range(submit.params.n):
            stream = served.streams.get((key, index), [])
            expected = right.streams[key, index]
            if left and stream != expected:  # up to where its client or its own end came first
                some = [each for each in stream if len(each) == 2]
                if some != expected[: len(some)]:
                    differ.append((key, index))
            elif stream == expected:
                tokens += len(stream)
            else:
                differ.append((key, index))
    return Compared(tokens, differ)


class House:
    """A model, its adapters, and what each request gets without drafts."""

    def __init__(self, folder: Path) -> None:
        model = make_checkpoint(folder / "m", "llama", tokenizer=True)
        for name, rank in RANKS.items():
            write_adapter(folder / "adapters" / name, rank)
        self.config = make_config({
            "model": str(model), "device": "cpu", "dtype": "bfloat16", "batch_invariant": True,
            "kv_cache_bytes": 1 << 23, "max_num_seqs": 24, "max_num_batched_tokens": 128,
            "adapters": str(folder / "adapters"), "max_adapters": 3, "watermark": 0.0,
            "aging_s": 2.0, "threads": 1, "tiers": [{"name": "live"}, {"name": "bulk"}],
        })  # fmt: skip
        self.asked = make_submits()
        self.right = serve_alone(self.config, self.asked)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("mixed"))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "eagle"])
def test_a_thousand_requests(house: House, drafter: str, tmp_path: Path) -> None:
    """The draft model is the model itself: right without adapters, wrong with them. The head is of
    random weights. With it no step is one native call, so that adapters are refused."""
    asked = house.asked
    options = msgspec.structs.asdict(house.config)
    speculation: dict[str, object] = {"drafter": drafter, "max_drafts": 4}
    blocks = 40 * 4096
    if drafter == "draft_model":
        speculation["model"], blocks = house.config.model, 2 * blocks
    elif drafter == "eagle":
        speculation["model"], blocks = make_head(tmp_path, house.config.model), 2 * blocks
        options["adapters"] = None
        asked = [submit for submit in asked if submit.params.lora_name is None]
    config = make_config({**options, "speculation": speculation, "kv_cache_bytes": blocks})
    served, right = serve_and_kill(config, asked), house.right
    compared = compare(asked, served, right)
    assert not compared.differ
    assert compared.tokens > 15 * len(asked)
    assert min(served.accepted, served.drafted - served.accepted, served.preemptions) > 0
    assert served.hits > 0
    assert (served.loads > 0) == (config.adapters is not None)

"""The scheduler, the KV manager and the engine's step under arbitrary traffic in tiny pools.

A hypothesis state machine drives the real engine over the arithmetic fake runner, whose tokens
depend on every slot read back through the block table. After every rule all invariants hold; at the
end everything drains within a computed number of steps, every request has had exactly one terminal
event, and every stream is what the request would have got alone. Half of the runs overlap: the
runner is asynchronous then, and its device runs a step at a moment drawn by chance.
"""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from jitney.adapters.pool import AdapterPool
from jitney.batch import Batch
from jitney.core.borders import Borders
from jitney.core.kv_cache import block_hash, root_hash
from jitney.core.policy.cost import StepCost, Weights
from jitney.core.policy.prices import NO_DRAFTS, Prices
from jitney.core.policy.speculation import Speculation
from jitney.engine.engine import Engine
from jitney.execution.low_rank import LowRank
from jitney.messages import (
    Cancel,
    Cancelled,
    Failed,
    Finish,
    Finished,
    PromptLogprobs,
    StepReport,
    Submit,
    Tokens,
)
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.fake_grammar import FakeGrammar
from tests.fake_runner import FakeRunner
from tests.fake_tokens import VOCAB_SIZE, candidates, context
from tests.inline import Inline
from tests.prophet import Prophet
from tests.solo_stream import solo_stream

MAX_MODEL_LEN = 24
TRUNK = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]  # prompts share its beginnings


pytestmark = pytest.mark.usefixtures("quiet")

WISHES = st.fixed_dictionaries(
    {
        "shared": st.integers(0, len(TRUNK)),
        "tail": st.lists(st.integers(0, 2), max_size=4),
        "n": st.sampled_from([1, 1, 1, 2, 3, 9]),
        "max_tokens": st.integers(1, 12),
        "priority": st.integers(-2, 2),
        "patience": st.sampled_from([None, None, None, None, 0.02, 3.0]),
        "cache_salt": st.sampled_from([None, None, "tenant"]),
        "lora_name": st.sampled_from([None, None, "a", "b", "c"]),
        "stop_ids": st.sampled_from([(), (), tuple(range(0, VOCAB_SIZE, 7))]),
        "tier": st.sampled_from([None, None, "0", "1", "2"]),
        "logprobs": st.sampled_from([None, 0]),
        "prompt_logprobs": st.sampled_from(5 * [None] + [1]),
        "repetition_penalty": st.sampled_from(6 * [1.0] + [1.3]),
        "bad_words_ids": st.sampled_from(6 * [[]] + [[[1, 2]]]),
        "grammar": st.sampled_from(4 * [""] + ["0,2,5:4", "1,3:9", "2,3:9:2", "0,1,5:12:7"]),
    }
)
FAULTS = ["raise", "raise late", "raise at launch"]


class Expected:
    """What the front knows of one request, and what it has seen."""

    def __init__(self, submit: Submit) -> None:
        n = submit.params.n
        self.submit = submit
        self.most = min(submit.params.max_tokens, MAX_MODEL_LEN - len(submit.prompt))
        self.solo = [solo_stream(submit, i, max_model_len=MAX_MODEL_LEN) for i in range(n)]
        self.streams: list[list[int]] = [[] for _ in range(n)]
        self.sums = [0.0] * n
        self.reasons: list[str | None] = [None] * n
        self.stopped: set[int] = set()  # indices whose Finish was sent
        self.cancelled = False
        self.may_break = False
        self.prompt_logprobs = False
        self.terminal: Finished | Cancelled | Failed | None = None


class Traffic(RuleBasedStateMachine):
    """One engine, its clients and its clock."""

    engine: Engine | None = None  # until ``start``

    @initialize(
        num_blocks=st.integers(3, 16) | st.integers(8, 16),
        block_size=st.sampled_from([1, 2, 3, 4, 4]),
        eviction=st.sampled_from(["never", "preempt", "preempt"]),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 6) | st.integers(7, 12),
        max_queued=st.sampled_from([0, 3, 100, 100]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        overlap=st.booleans(),
        room=st.integers(1, 3),
        pace=st.tuples(st.integers(0, 7), st.sampled_from([0.0, 0.3, 0.7])),
        drafts=st.sampled_from([0, 0, 1, 3, 8]),
        foresight=st.sampled_from([0.5, 0.9, 1.0]),
        asks=st.booleans(),
        tiers=st.sampled_from([0, 0, 2, 3]),
        priority_preempts=st.sampled_from([False, False, True]),
        seconds=st.tuples(
            st.sampled_from([None, 1, 9, 30]),
            st.sampled_from([None, 1, 3, 6, 12]),
            st.sampled_from([None, 20]),
        ),
        limits=st.tuples(st.sampled_from([None, 1, 2]), st.sampled_from([None, None, 0, 2])),
        slots=st.sampled_from([0, 0, 0, 1, 2, 4, 12]),
        snapshots=st.tuples(st.sampled_from([0, 1, 2, 5, 5]), st.integers(1, 3), st.integers(1, 3)),
        kind=st.sampled_from(
            [("opaque", "any"), ("opaque", "whole"), ("state", "any"), ("state", "any")]
        ),
    )
    def start(
        self,
        num_blocks,
        block_size,
        budget,
        overlap,
        pace,
        drafts,
        foresight,
        asks,
        slots,
        snapshots,
        kind,
        **options,
    ) -> None:
        keeps_snapshots = slots and kind == ("state", "any")
        tiers, targets, limits = (options.pop(name) for name in ("tiers", "seconds", "limits"))
        options["tiers"] = [
            {"name": "0", "ttft_ms": targets[0], "gap_ms": targets[1], "max_running": limits[0]},
            {"name": "1", "gap_ms": targets[2], "aging_s": 0.5, "share": 0.2},
            {"name": "2", "max_running": limits[0], "max_queued": limits[1], "aging_s": 1.0},
        ][:tiers]
        chance, room = random.Random(pace[0]), options.pop("room")
        self.runner = FakeRunner(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            faults=self._maybe_raise,
            overlap=overlap,
            launch_faults=self._maybe_raise_at_launch,
            device=lambda: chance.random() < pace[1],
            num_slots=slots,
            num_snapshots=snapshots[0] if keeps_snapshots else 0,
            cache=kind[0] if slots else "paged",
            chunking=kind[1] if slots else "any",
        )
        self.now = 100.0
        options |= {"model": "fake", "block_size": block_size, "aging_s": 1.0}
        speculation = {"drafter": "draft_model", "model": "m"} if asks else {}
        speculation["max_drafts"] = drafts
        # The clock jumps by hours, while adapters are loaded when the test wants it.
        options["load_watchdog_s"] = 86_400
        config = make_config(options | {"speculation": speculation if drafts else None})
        self.loading: list[Callable[[], None]] = []
        pool = AdapterPool(
            lambda name: LowRank(name, {}),
            lambda name: None,
            lambda name: (),
            most=room,
            aging_s=1.0,
        )
        self.engine = Engine(
            config, self.runner, lambda: self.now, compile_grammar=FakeGrammar, adapters=pool
        )
        scheduler = self.engine.scheduler
        # In such short sequences: blocks between two snapshots.
        scheduler._planner._borders = Borders(
            scheduler.live, least=snapshots[1], every=snapshots[2]
        )
        later = SimpleNamespace(submit=lambda *call: self.loading.append(partial(*call)))
        self.engine.pending.threads = [Inline(), later]
        self.pool = pool
        self.engine.inbox.wait = self._go_on_loading
        self.prophet = Prophet(lambda: chance.random() < foresight)
        self.runner.foresee = self.prophet.foresee
        policies = self.engine.scheduler.policies
        speculation = policies.drafts
        if isinstance(speculation, Speculation):
            if not asks:
                speculation.drafter = self.prophet
            speculation._prices = lambda some: chance.choice([Prices(0.0), Prices(0.0), NO_DRAFTS])
        if isinstance(policies.cost, StepCost):  # a millisecond for each step, token and sample
            policies.cost.weights = Weights(
                1e-3, 0.0, 1e-3, 1e-3, draft=2e-3, model_pass=1e-3, read_token=1e-3
            )
        self.requests: dict[int, Expected] = {}
        self.poisoned: set[int] = set()
        self.raise_once: str | None = None
        self.known_blocks: dict[bytes, list] = {}
        self.known_pasts: dict[bytes, list] = {}

    # ------------------------------------------------------------------ rules

    @rule(wishes=st.lists(WISHES, min_size=1, max_size=4))
    def submit(self, wishes) -> None:
        for wish in wishes:
            self._submit(**wish)

    @rule(wish=WISHES, times=st.integers(2, 6))
    def submit_crowd(self, wish, times) -> None:
        """The same prompt several times: all of it shared, blocks short soon."""
        for _ in range(times):
            self._submit(**wish)

    def _submit(self, shared, tail, patience, stop_ids, bad_words_ids, grammar, **params) -> None:
        key = len(self.requests)
        known = {one.name for one in self.engine.scheduler.config.tiers}
        params["tier"] = params["tier"] if params["tier"] in known else None
        least = min(2, params["max_tokens"])
        message = Submit(
            key=key,
            prompt=TRUNK[:shared] + tail or [7],
            params=SamplingParams(min_tokens=least, seed=key % 3, **params),
            stop_ids=frozenset(stop_ids),
            bad_words_ids=bad_words_ids,
            arrival=self.now,
            deadline=None if patience is None else self.now + patience,
            grammar=grammar,
        )
        expected = self.requests[key] = Expected(message)
        for index, stream in enumerate(expected.solo):
            self.prophet.streams[key, index] = [*stream, 0, 1, 2]
            self._know_blocks(message.prompt + stream, message.params)
        self.engine.send(message)

    @rule(advance=st.sampled_from([0.0, 0.01, 0.2]))
    def step(self, advance) -> None:
        self.now += advance
        report = self._step()
        if report is not None:
            self._take(report)
        for one in self.requests.values():
            assert one.terminal or one.submit.deadline is None or one.submit.deadline > self.now

    @rule(times=st.integers(2, 12))
    def steps(self, times) -> None:
        for _ in range(times):
            self.step(0.01)
            self.integrity()

    def _step(self) -> StepReport | None:
        """A step that does something, if there is anything to do."""
        self.waited = True
        while self.waited:
            self.waited = False
            report = self.engine.step()
            assert not (self.waited and report.events)
        return report

    def _go_on_loading(self, timeout: float | None) -> None:
        """Instead of the engine's wait for a loader: nothing else is to be done."""
        self.waited = True
        if self.loading:
            self.load_adapter()

    @precondition(lambda self: self.engine and self.loading)
    @rule()
    def load_adapter(self) -> None:
        self.loading.pop(0)()

    def _draw_key(self, data) -> int:
        """Mostly one that lives; an ended one at times."""
        live = [key for key, one in self.requests.items() if one.terminal is None]
        keys = sorted(self.requests)
        return data.draw(st.sampled_from(4 * live + keys[:2]))

    @rule(
        data=st.data(),
        wish=WISHES,
        n=st.integers(2, 3),
        then=st.sampled_from(["cancel", "finish", *FAULTS]),
    )
    def disturb_fork(self, data, wish, n, then) -> None:
        """Go on until a sequence has just been copied from another, which lasts one step only."""
        self._submit(**wish | {"n": n, "max_tokens": 4, "patience": None})
        kv = self.engine.scheduler.kv
        for _ in range(20):
            self.step(0.0)
            self.integrity()
            if kv.pending_copies() or self.engine.scheduler.live.slots.pending_copies():
                break
        else:
            return
        if then.startswith("raise"):
            self.raise_in_next_step(then)
        else:
            key, index = data.draw(st.sampled_from(self._owners_of_copies()))
            self.requests[key].cancelled |= then == "cancel"
            self.requests[key].stopped.add(index)
            self.engine.send(Cancel(key) if then == "cancel" else Finish(key, index))
        self.step(0.0)

    def _owners_of_copies(self) -> list[tuple[int, int]]:
        """(key, index) of the sequences at either end of a pending copy."""
        live = self.engine.scheduler.live
        copied = {block for copy in live.kv.pending_copies() for block in copy}
        slots = {slot for copy in live.slots.pending_copies() for slot in copy}
        owners = [one for one in live.running if copied & set(one.table) or one.slot in slots]
        return [(one.request.message.key, one.index) for one in owners]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        key = self._draw_key(data)
        self.requests[key].cancelled = True
        self.engine.send(Cancel(key))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data) -> None:
        key = self._draw_key(data)
        index = data.draw(st.integers(0, self.requests[key].submit.params.n - 1))
        self.requests[key].stopped.add(index)
        self.engine.send(Finish(key, index))

    @rule(fault=st.sampled_from(FAULTS))
    def raise_in_next_step(self, fault) -> None:
        """A passing fault; one at a time, or a request that is tried again alone may be failed."""
        if all(step.error is None for step in self.runner.in_flight):
            self.raise_once = fault

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), raises=st.booleans())
    def break_request(self, data, raises) -> None:
        """From now on this request breaks every step it is in, or its own row."""
        key = self._draw_key(data)
        self.requests[key].may_break = True
        (self.poisoned if raises else self.runner.bad_keys).add(key)

    @rule(seconds=st.sampled_from([0.02, 3.0, 3600.0]))
    def jump(self, seconds) -> None:
        self.now += seconds

    @invariant()
    def integrity(self) -> None:
        if self.engine is not None:
            self.engine.scheduler.check_integrity()
            kv = self.engine.scheduler.kv
            for key, block in kv._block_of.items():
                assert self.runner.block(block) == self.known_blocks[key], "wrong content"
            self._check_snapshots()
            assert self.runner.violations == []
            assert self.engine._steps.num_in_flight == len(self.runner.in_flight) <= 1

    def teardown(self) -> None:
        if self.engine is None:
            return
        self.raise_once = None
        live = [one for one in self.requests.values() if one.terminal is None]
        # A step either decodes, which makes a token that is never lost, or computes nothing but
        # tokens of prompts and recomputations, all of which are there at once in the worst case.
        to_make = sum(one.most * one.submit.params.n for one in live)
        to_compute = sum((len(one.submit.prompt) + one.most) * one.submit.params.n for one in live)
        bound = 2 * (to_make + 1) * (to_compute + 1)  # twice: some only complete the step before
        steps = 0
        while self.engine.has_work:
            report = self._step()
            if report is None:
                assert not self.engine.scheduler.has_work, "work waits, and the step did nothing"
                break
            self._take(report)
            self.integrity()
            steps += 1
            assert steps <= bound, "the engine does not drain"
        assert all(one.terminal is not None for one in self.requests.values())
        assert self.engine.scheduler.kv.num_used == 0, "a block leaked"
        slots = self.engine.scheduler.live.slots
        assert slots.num_free + len(slots.snapshots) == slots.total, "a slot leaked"
        assert self.runner.in_flight == []
        assert self.engine.step() is None
        pool = self.pool
        assert not self.engine.pending
        assert not any((pool._queue, pool._requests))
        assert not any(entry.users for entry in pool._entries.values())
        assert len(pool._entries) <= pool._most

    # ------------------------------------------------------------------ checks

    def _take(self, report: StepReport) -> None:
        for event in report.events:
            one = self.requests[event.key]
            assert one.terminal is None, "an event after the end"
            if isinstance(event, Tokens):
                self._take_tokens(one, event)
            elif isinstance(event, PromptLogprobs):
                assert not any(one.streams)
                assert not one.prompt_logprobs
                one.prompt_logprobs = True
                entries = enumerate(one.submit.prompt)
                made = [candidates(token, i, VOCAB_SIZE) if i else None for i, token in entries]
                assert event.logprobs == made
            else:
                one.terminal = event
                self._check_end(one)

    def _take_tokens(self, one: Expected, event: Tokens) -> None:
        params, stream = one.submit.params, one.streams[event.index]
        assert one.reasons[event.index] is None, "tokens after the end of a sequence"
        assert one.prompt_logprobs == (params.prompt_logprobs is not None)
        stream += event.ids
        solo = one.solo[event.index]
        assert stream == solo[: len(stream)], "not the tokens of the solo run"
        reason = one.reasons[event.index] = event.finish_reason
        if event.stop_id is not None:
            assert (reason, stream) == ("stop", solo)
        elif reason == "stop":
            complete = one.submit.grammar and stream == solo
            assert event.index in one.stopped or complete
        elif reason == "length":
            assert len(stream) == one.most
        elif reason == "deadline":
            assert one.submit.deadline is not None
            assert one.submit.deadline <= self.now
        else:
            several = one.submit.grammar.count(":") == 2 or self.engine.config.speculation
            assert len(event.ids) == 1 or (several and event.ids)
            assert stream != solo, "a sequence goes on after its end"
        if params.logprobs is None:
            assert event.logprobs is event.cumulative_logprob is None
        else:
            at = len(one.submit.prompt) + len(stream) - len(event.ids)
            made = enumerate(event.ids, at)
            assert event.logprobs == [candidates(token, i, VOCAB_SIZE) for i, token in made]
            for entry in event.logprobs:
                one.sums[event.index] += entry[0].logprob
            assert event.cumulative_logprob == one.sums[event.index]

    def _check_end(self, one: Expected) -> None:
        end, submit = one.terminal, one.submit
        refused = isinstance(end, Failed) and end.code == "INVALID_ARGUMENT"
        assert self._fits(one) != refused
        if isinstance(end, Finished):
            assert None not in one.reasons
            assert end.timing.total_s == self.now - submit.arrival
            made = end.timing.cached_prompt_tokens + end.timing.computed_prompt_tokens
            assert made == len(submit.prompt)
        elif isinstance(end, Cancelled):
            assert one.cancelled
        elif end.code == "UNAVAILABLE":
            assert "queue is full" in end.message
        elif end.code == "DEADLINE_EXCEEDED":
            assert not any(one.streams)
            assert submit.deadline is not None
            assert submit.deadline <= self.now
        elif not refused:
            assert end.code == "INTERNAL"
            assert one.may_break

    def _fits(self, one: Expected) -> bool:
        """By enumeration: does one sequence (``never``: do all, sharing what is full of the
        prompt, or all that may run at once, sharing nothing) fit an empty pool, slots for all
        tokens but the last?"""
        size, scheduler = self.runner.info.block_size, self.engine.scheduler
        prompt, n = len(one.submit.prompt), one.submit.params.n
        at_once = min(scheduler.config.max_num_seqs, self.runner.info.max_num_batched_tokens)
        slots = self.runner.info.num_slots
        at_once = min(at_once, slots or at_once)
        if tiers := scheduler.config.tiers:
            cap = tiers[int(one.submit.params.tier or len(tiers) - 1)].max_running
            at_once = min(at_once, cap or at_once)
        together = scheduler.config.eviction == "never" and one.most > 1
        blocks = set()
        for index in range(min(n, at_once) if together else 1):
            for position in range(prompt + one.most - 1):
                block = position // size
                shared = n <= at_once and (block + 1) * size <= prompt and not slots
                blocks.add((block, 0 if shared else index))
        return one.most >= 1 and len(blocks) <= self.runner.info.num_blocks

    def _know_blocks(self, tokens: list[int], params: SamplingParams) -> None:
        size, adapter = self.runner.info.block_size, params.lora_name
        slots, key = context(tokens, adapter), root_hash(params.cache_salt, adapter or "")
        for start in range(0, len(tokens) - size + 1, size):
            key = block_hash(key, tokens[start : start + size])
            self.known_blocks[key] = slots[start : start + size]
            self.known_pasts[key] = slots[: start + size]

    def _check_snapshots(self) -> None:
        snapshots = self.engine.scheduler.live.slots.snapshots
        for key in snapshots.keys_by_age():
            past = self.runner.slots[snapshots.slot_of(key)]
            assert past == self.known_pasts[key], "a snapshot of another past"

    def _maybe_raise(self, batch: Batch, written: bool) -> None:
        if self.raise_once == ("raise late" if written else "raise"):
            self._pass_fault(batch)
        for row in batch.rows:
            if row.key in self.poisoned and written == bool(row.key % 2):
                raise RuntimeError("a fault of one request")

    def _pass_fault(self, batch: Batch) -> None:
        self.raise_once = None
        if len(batch.rows) == 1 and self.poisoned:  # which may have made this the second try
            self.requests[batch.rows[0].key].may_break = True
        raise RuntimeError("a passing fault")

    def _maybe_raise_at_launch(self, batch: Batch) -> None:
        if self.raise_once == "raise at launch":
            self._pass_fault(batch)
        if any(row.key in self.poisoned and row.key % 3 == 0 for row in batch.rows):
            raise RuntimeError("a fault of one request")


_checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
profile = partial(settings, deadline=None, suppress_health_check=_checks)


class TestTraffic(Traffic.TestCase):
    """The short profile, of every run."""

    settings = profile(max_examples=150, stateful_step_count=30)


@pytest.mark.slow
class TestTrafficAtLength(Traffic.TestCase):
    """The long profile, of ``make test-all``: twice as many examples, and longer ones."""

    settings = profile(max_examples=300, stateful_step_count=100)

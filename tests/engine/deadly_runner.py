"""The arithmetic runner, in a process of its own: some prompt tokens end the engine that computes
them. ``tests.engine.deadly_runner:loader`` is a loader for :class:`SupervisedEngine`."""

import gc
import logging
import os
import signal
import time
from typing import Any

import msgspec
import PIL  # noqa: F401  # which a fork server hides at first: so it imports this once more, without
from jitney.batch import Adapter, Batch, Row
from jitney.config import EngineConfig
from jitney.engine.loading import EngineParts, LoadModel
from jitney.engine.source import Source
from jitney.errors import CheckpointError, DeviceLostError

from tests.fake_grammar import FakeGrammar, FakeState
from tests.fake_runner import FakeRunner

KILLS, HANGS, LOSES_THE_DEVICE, COMPILES = 49, 48, 47, 46
"""Tokens of a prompt, and what becomes of the engine that computes them. Others are below 46."""

DEADLY_GRAMMAR = "ends the engine that compiles it"
SLOW_GRAMMAR = "0,2:7"
"""It takes six seconds."""
DEADLY_WHEN_BEGUN = "0,2:8"
"""It ends the engine when a request begins with it."""
HANGING_GRAMMAR = "takes an hour"

STEP_S = 0.002
_COLLECTS = gc.isenabled()


def loader() -> LoadModel:
    """For the fork server."""
    return load


def hanging_loader() -> LoadModel:
    """It hangs before an engine is forked, as an import of a library may."""
    time.sleep(3600)
    return load


def loader_with_adapters() -> LoadModel:
    """The same, where engines have adapters: it imports what they need, ten seconds of work, once
    for all that are forked."""
    from jitney.adapters import pool  # noqa: F401
    from jitney.execution import low_rank  # noqa: F401

    return load


def load(config: EngineConfig, tokenizer: bytes) -> EngineParts:
    """``model`` says what kind of load it is: ``fine``, ``slow``, ``hangs``, ``broken``, ``dies``,
    ``garbage``: refused with what the collector does, or ``measures``: each process finds room for
    another number of blocks, of a byte each."""
    if config.model == "slow":
        time.sleep(3)
    if config.model == "hangs":
        time.sleep(3600)
    if config.model == "broken":
        raise CheckpointError("model.safetensors is truncated")
    if config.model == "garbage":
        frozen, free = gc.get_freeze_count(), len(gc.get_objects())
        when = f"while importing: {_COLLECTS}, now: {gc.isenabled()}"
        raise CheckpointError(f"collects {when}, mostly frozen: {frozen > free}")
    if config.model == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    free = 256 + (os.getpid() % 10_007 if config.model == "measures" else 0)
    num_blocks = config.kv_cache_bytes or free
    runner = FakeRunner(faults=_faults, num_blocks=num_blocks, step_seconds=STEP_S)
    runner.info = msgspec.structs.replace(runner.info, kv_cache_bytes=num_blocks)
    pool = None if config.adapters is None else _pool(config, runner)
    return EngineParts(runner, b"" if tokenizer else b"words", _compile, pool)


class _DeadlyGrammar(FakeGrammar):
    def begin(self, may_end: bool) -> FakeState:
        os.kill(os.getpid(), signal.SIGABRT)
        time.sleep(3600)  # until the signal is delivered
        return super().begin(may_end)


def _compile(text: str) -> FakeGrammar:
    if text == DEADLY_WHEN_BEGUN:
        return _DeadlyGrammar(text)
    if text == DEADLY_GRAMMAR:
        os.kill(os.getpid(), signal.SIGABRT)
        time.sleep(3600)  # until the signal is delivered
    if text == SLOW_GRAMMAR:
        time.sleep(6)
    if text == HANGING_GRAMMAR:
        time.sleep(3600)
    return FakeGrammar(text)


def _pool(config: EngineConfig, runner: Any) -> Source[Adapter]:
    """The real one: adapters of one layer, whose files alone matter to a fake runner."""
    from jitney.adapters.pool import make_pool
    from jitney.execution.low_rank import LowRank, Site

    runner.sites, runner.make_adapter = {"layer": Site(4, 4)}, LowRank
    return make_pool(config, runner)


def _faults(batch: Batch, written: bool) -> None:
    if written:
        return
    computed = {token for row in batch.rows for token in _prompt_tokens(row)}
    if KILLS in computed:
        os.kill(os.getpid(), signal.SIGKILL)
    if HANGS in computed:
        time.sleep(3600)
    if COMPILES in computed:
        for number in range(4):
            logging.getLogger("jitney.engine").info("preparing the kernel %d", number)
            time.sleep(1.5)
    if LOSES_THE_DEVICE in computed:
        raise DeviceLostError("the device has fallen off the bus")


def _prompt_tokens(row: Row) -> list[int]:
    return row.prompt[row.start : row.end]

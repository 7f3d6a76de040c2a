"""The offline class: the server's engine without a server.

An :class:`LLM` owns an engine and makes its steps itself, in its caller's thread, whenever results
are needed: inside :meth:`LLM.generate`, or between two pieces of :meth:`LLM.stream`. Streams may be
read in turns and mixed with calls of ``generate``; all that is open shares the batch. Not for use
from several threads at once.

With ``process=True`` the engine lives in a process of its own, as a server's does, and makes its
steps there: it may die, and what is open goes on in another one.
"""

import itertools
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jitney.config import EngineConfig
from jitney.engine.engine import Engine
from jitney.engine.grammar_check import GrammarChecker
from jitney.engine.handle import EngineHandle, LocalEngine
from jitney.engine.supervisor import SupervisedEngine
from jitney.errors import InvalidArgumentError, JitneyError, from_code
from jitney.messages import Failed, Finished, Logprob, ModelInfo, Submit, Timing
from jitney.open_requests import COUNTS, OpenRequest, OpenRequests
from jitney.progress import Progress, State
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams, parse_sampling_params
from jitney.text.chat import make_chat
from jitney.text.completion import SequenceDelta
from jitney.text.grammar_process import CHECKER_MODULE, checker_first_line
from jitney.text.intake import encode_chat, encode_prompt, make_submit
from jitney.text.tokenizer import Tokenizer, TokenizerData

Prompt = str | list[int]
OneParams = SamplingParams | Mapping[str, object]
Params = OneParams | Sequence[OneParams] | None
Running = dict[Any, OpenRequest]
"""Requests that were started and not collected yet (:meth:`LLM.collect_ended`). The keys are the
caller's own."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The result of one prompt."""

    prompt_ids: list[int]
    sequences: list[SequenceDelta]
    """The whole of each of the ``n`` sequences."""
    prompt_logprobs: list[list[Logprob] | None] | None = None
    timing: Timing | None = None
    error: JitneyError | None = None
    """Set if the engine refused this request, or if it failed later; it has no sequences then."""

    @property
    def text(self) -> str:
        """Text of the first sequence. Raises ``error`` if there is one."""
        return self._first.text

    @property
    def ids(self) -> list[int]:
        """Token ids of the first sequence. Raises ``error`` if there is one."""
        return self._first.ids

    @property
    def finish_reason(self) -> str | None:
        """Of the first sequence: ``stop``, ``length`` or ``deadline``. Raises ``error``."""
        return self._first.finish_reason

    @property
    def _first(self) -> SequenceDelta:
        if self.error is not None:
            raise self.error
        return self.sequences[0]


class LLM:
    """A loaded model. ``with LLM(path) as llm: …`` gives its memory back at the end."""

    def __init__(self, path: str | Path, *, process: bool = False, **options: Any) -> None:
        """Load the checkpoint in folder ``path`` (or of that id in the local hub cache).

        With ``process`` the engine runs in a process of its own and is started again if it dies:
        what is open goes on with the same tokens. torch is not imported here then.

        ``options`` are those of ``model.json`` (``config.EngineConfig``). Raises a LoadError that
        says what is wrong with an option, a file or the architecture.
        """
        self.config = make_config({**options, "model": str(path)})
        load = _load_in_process if process else _load_here
        # ``loaded`` knows how to give back all that is loaded here. If anything raises before the
        # end of this block, it does so at once.
        with ExitStack() as loaded:
            model = load(self.config, loaded)
            self._engine = model.engine
            self.tokenizer = model.tokenizer
            # The process that checks grammars reads this line before any other.
            first_line = checker_first_line(self.tokenizer.data, self.info, self.config)
            self._grammars = GrammarChecker(self.config, CHECKER_MODULE, first_line)
            loaded.callback(self._grammars.close)
            # All is loaded: from now on close() gives it back, or the end of this object.
            self._give_back = weakref.finalize(self, loaded.pop_all().close)
        # Python also calls a finalizer when the interpreter exits, unless ``atexit`` is false. Only
        # an engine's process has to be ended then.
        self._give_back.atexit = process
        self._keys = itertools.count()
        self._open = OpenRequests(self._engine, self.tokenizer)
        self.figures = self._open.figures
        """Counts since the model was loaded, or since :meth:`generate` or a job began, for displays
        of progress: ``COUNTS``, and ``most_rows`` (option ``max_num_seqs``)."""
        self.figures["most_rows"] = self.config.max_num_seqs

    # ------------------------------------------------------------------ what callers use

    @property
    def info(self) -> ModelInfo:
        """Context length, vocabulary, cache size and the like."""
        return self._engine.info

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params = None, *, progress: bool = True
    ) -> list[Completed]:
        """Complete every prompt, a text or a list of token ids; results in the prompts' order.

        ``params`` hold for all of them, or are one for each. Those that they leave unset are the
        checkpoint's own (option ``generation_config``). A mapping of names and values says exactly
        what is set. In SamplingParams a value that is the default counts as unset: to ask for a
        temperature of 1, give ``{"temperature": 1.0}``. Raises InvalidArgumentError before
        anything runs if any prompt or parameter is wrong. A request that the engine refuses, or
        that fails later, does not stop the others: its result carries the error.
        """
        ids = [self._encode(prompt) for prompt in _listed(prompts)]
        return self._complete(self.requests(ids, self._with_defaults(params)), progress)

    def chat(
        self,
        messages: Sequence[Any],
        params: Params = None,
        *,
        chat_template_parameters: Mapping[str, object] | None = None,
        progress: bool = True,
    ) -> list[Completed]:
        """Answer a chat, a list of messages ``{"role": …, "content": …}``, or each of a list of
        chats, through the model's chat template. Otherwise as :meth:`generate`."""
        are_chats = len(messages) > 0 and isinstance(messages[0], list)
        chats = messages if are_chats else [messages]
        ids = []
        for raw in chats:
            chat = make_chat(raw, chat_template_parameters or {}, self.config)
            ids.append(encode_chat(chat, self.tokenizer, self.config, self.info))
        return self._complete(self.requests(ids, self._with_defaults(params)), progress)

    def stream(self, prompt: Prompt, params: OneParams | None = None) -> Iterator[SequenceDelta]:
        """Complete one prompt piece by piece, as the engine's steps give something new.

        With ``n`` > 1 the pieces of the sequences come mixed, each with its ``index``. The prompt
        is checked at once, not at the first piece. Closing the iterator cancels the request.
        """
        (submit,) = self.requests([self._encode(prompt)], self._with_defaults(params))
        return self._pieces(submit)

    def close(self) -> None:
        """Give the model's memory back. What is open ends; the object is of no use afterwards."""
        self._open.forget()
        self._give_back()  # a finalizer: it does nothing when called again

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------ what jobs use

    def capacity_for(self, tiers: Iterable[str | None]) -> int:
        """How many requests of these tiers (None: the default tier) to have open at once: twice
        what the batch holds, so that the next ones are there when others end, but no more than
        ``max_queued`` allows, the option's and that of each of these tiers."""
        most = min(2 * self.config.max_num_seqs, self.config.max_queued)
        if self.config.tiers:
            for name in tiers:
                tier = self.config.tiers[self.config.tier_of(name)]
                if tier.max_queued is not None:
                    most = min(most, tier.max_queued)
        return max(1, most)

    def requests(self, prompts: list[list[int]], params: Params) -> list[Submit]:
        """Requests of token ids for :meth:`start`. The checkpoint's own parameters are not filled
        in. Raises InvalidArgumentError."""
        self._check_not_closed()
        if params is None or isinstance(params, SamplingParams | Mapping):
            same = _parsed(params or SamplingParams())
            params_of_each = [same] * len(prompts)
        else:
            params_of_each = [_parsed(own) for own in params]
        if len(params_of_each) != len(prompts):
            raise InvalidArgumentError(
                f"params has {len(params_of_each)} entries, but there are {len(prompts)} prompts"
            )
        pairs = zip(prompts, params_of_each, strict=True)
        return [self._request(ids, own) for ids, own in pairs]

    def start(self, submit: Submit) -> OpenRequest:
        """Hand a request to the engine. Its times count from now, not from its check."""
        return self._open.start(submit)

    def collect_ended(self, running: Running) -> list[tuple[Any, Completed]]:
        """Take the requests that have ended out of ``running``, and return their results. If none
        has ended, make a step first."""
        if not _ended_keys(running):
            self._step()
        results: list[tuple[Any, Completed]] = []
        for key in _ended_keys(running):
            request = running.pop(key)
            results.append((key, _completed_of(request)))
        return results

    def is_running(self, request: OpenRequest) -> bool:
        """Whether a request that was started has left the queue, and has not ended. With
        ``process=True`` it is not known: False."""
        return self._open.is_running(request)

    def cancel(self, running: Running, keys: Iterable[Any]) -> None:
        """Take requests out of ``running``, and end them without a result."""
        requests = [running.pop(key) for key in keys]
        if requests:
            self._abort([request.submit.key for request in requests])

    # ------------------------------------------------------------------ parts

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return encode_prompt(prompt, self.tokenizer, self.config, self.info)
        if not isinstance(prompt, list) or not all(type(each) is int for each in prompt):
            raise InvalidArgumentError.of("prompts", prompt, "texts or lists of token ids")
        return prompt.copy()

    def _with_defaults(self, params: Params) -> Params:
        """``params`` with the checkpoint's own where they are unset: see :meth:`generate`."""
        defaults = self.info.sampling_defaults
        are_one = params is None or isinstance(params, SamplingParams | Mapping)
        if are_one or not isinstance(params, Iterable):
            return {**defaults, **_stated(params)}
        return [{**defaults, **_stated(own)} for own in params]

    def _request(self, prompt: list[int], params: SamplingParams) -> Submit:
        return make_submit(
            key=next(self._keys),
            prompt_ids=prompt,
            params=params,
            tokenizer=self.tokenizer,
            info=self.info,
            config=self.config,
            now=time.monotonic(),
            check_grammar=self._grammars.check,
        )

    def _complete(self, submits: list[Submit], progress: bool) -> list[Completed]:
        """Run requests to their ends; the results in the order of ``submits``."""
        running: Running = {}
        done: dict[int, Completed] = {}
        waiting = deque(submits)
        num_bad = 0
        capacity = self.capacity_for({submit.params.tier for submit in submits})
        display = Progress(rows="prompts", shown=progress)
        self.figures.update(dict.fromkeys(COUNTS, 0.0))
        began = time.monotonic()
        try:
            while waiting or running:
                while waiting and len(running) < capacity:
                    submit = waiting.popleft()
                    running[submit.key] = self.start(submit)
                for key, completed in self.collect_ended(running):
                    done[key] = completed
                    if completed.error is not None:
                        num_bad += 1
                figures = {
                    **self.figures,
                    # The whole input was read before the first request began.
                    "taken": len(submits),
                    "position": 1.0,
                    "bad": num_bad,
                    "done": len(done),
                    "seconds": time.monotonic() - began,
                }
                display.show(State(figures))
        finally:
            display.close()
            self._abort([submit.key for submit in submits])
        return [done[submit.key] for submit in submits]

    def _pieces(self, submit: Submit) -> Iterator[SequenceDelta]:
        """What :meth:`stream` returns."""
        completion = self.start(submit).completion
        ended: set[int] = set()  # indices of sequences whose end the caller has got
        try:
            while completion.terminal is None or completion.has_pending:
                if not completion.has_pending:
                    self._step()
                    continue
                # A delta for every sequence. Leave out those that say nothing new. A sequence that
                # has ended repeats its finish reason, which is new only once.
                for delta in completion.take():
                    ends_now = delta.finish_reason is not None and delta.index not in ended
                    if ends_now:
                        ended.add(delta.index)
                    if delta.ids or delta.text or ends_now:
                        yield delta
            if isinstance(completion.terminal, Failed):
                raise from_code(completion.terminal.code, completion.terminal.message)
        finally:
            self._abort([submit.key])

    def _step(self) -> None:
        self._check_not_closed()
        self._open.step()

    def _abort(self, keys: list[int]) -> None:
        """Cancel those of ``keys`` that are still open. If nothing else is open, complete the step
        in flight."""
        self._open.cancel(keys)
        if not self._is_closed:
            self._open.settle()

    @property
    def _is_closed(self) -> bool:
        """Whether the model's memory has been given back."""
        return not self._give_back.alive

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise InvalidArgumentError("this LLM has been closed")


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A loaded model."""

    engine: EngineHandle
    tokenizer: Tokenizer


def _load_here(config: EngineConfig, loaded: ExitStack) -> _Loaded:
    """An engine in this process. ``loaded`` will give it back. Raises LoadError."""
    from jitney.engine import assemble  # slow to import

    tokenizer = Tokenizer.load(assemble.resolve_model(config.model))
    runner = assemble.load_runner(config)
    loaded.callback(runner.close)
    engine = Engine(
        config,
        runner,
        compile_grammar=assemble.grammar_compiler(tokenizer.data, runner.info),
        adapters=assemble.adapter_pool(config, runner),
    )
    handle = LocalEngine(engine)
    loaded.callback(handle.close)
    return _Loaded(handle, tokenizer)


def _load_in_process(config: EngineConfig, loaded: ExitStack) -> _Loaded:
    """An engine in a process of its own, which makes its steps by itself. ``loaded`` will end it.
    Raises LoadError."""
    engine = SupervisedEngine(config)
    data = engine.start()
    loaded.callback(engine.close)
    tokenizer = Tokenizer(msgspec.msgpack.decode(data, type=TokenizerData))
    engine.run_in_thread()
    return _Loaded(engine, tokenizer)


def _listed(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """One text, or one list of ids, stands for a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if isinstance(prompts, list) and listed and type(listed[0]) is int:
        return [listed]
    return listed


def _stated(params: object) -> dict[str, object]:
    """The parameters that the caller has set. Raises InvalidArgumentError."""
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return {name: value for name, value in params.items() if value is not None}
    if not isinstance(params, SamplingParams):
        bound = "SamplingParams, or a mapping of names and values, or a list of them"
        raise InvalidArgumentError.of("params", params, bound)
    given = msgspec.structs.asdict(params)
    unset = msgspec.structs.asdict(SamplingParams())
    return {name: value for name, value in given.items() if value != unset[name]}


def _parsed(params: object) -> SamplingParams:
    """``params`` with the types that its fields state: a struct made in Python may hold anything,
    such as one text as ``stop``. Raises InvalidArgumentError."""
    if isinstance(params, Mapping):
        return parse_sampling_params(params)
    if not isinstance(params, SamplingParams):
        raise InvalidArgumentError.of("params", params, "SamplingParams, or a list of them")
    return parse_sampling_params(msgspec.structs.asdict(params))


def _ended_keys(running: Running) -> list[Any]:
    return [key for key, request in running.items() if request.has_ended]


def _completed_of(request: OpenRequest) -> Completed:
    """The result of a request that has ended."""
    prompt = request.submit.prompt
    terminal = request.completion.terminal
    if isinstance(terminal, Finished):
        return Completed(
            prompt_ids=prompt,
            sequences=request.completion.take(),
            prompt_logprobs=request.completion.prompt_logprobs,
            timing=terminal.timing,
        )
    assert isinstance(terminal, Failed), "only its caller cancels a request"
    return Completed(prompt, [], error=from_code(terminal.code, terminal.message))

"""The engine of an :class:`~jitney.offline.llm.LLM` in a process of its own: it may die, and is
started again.

Has the calls of :class:`~jitney.engine.engine.Engine` that LLM makes. The engine makes its steps by
itself; a thread takes its reports.
"""

import queue
import threading

import msgspec

from jitney.config import EngineConfig
from jitney.engine.supervisor import EngineProcess
from jitney.messages import StepReport
from jitney.text.tokenizer import Tokenizer, TokenizerData


class ProcessEngine:
    """Call :meth:`close` at the end."""

    has_work = False
    """Nothing has to be driven: after a cancel, too, the engine makes its steps by itself."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the process and load the model. Raises a LoadError if that fails."""
        self.supervisor = EngineProcess(config)
        data = self.supervisor.start()
        self.tokenizer = Tokenizer(msgspec.msgpack.decode(data, type=TokenizerData))
        self.info = self.supervisor.info
        self.send = self.supervisor.send
        self._reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self.supervisor.run, args=(self._reports,), name="jitney-engine", daemon=True
        )
        self._thread.start()

    def step(self) -> StepReport:
        """The next report. To be called while a request is open: each one ends in a report."""
        return self._reports.get()

    def reset(self) -> None:
        """Drop the reports that wait. What is open has been cancelled."""
        while not self._reports.empty():
            self._reports.get()

    def close(self) -> None:
        """End the process and wait until it has ended."""
        self.supervisor.stop()
        self._thread.join()

"""Calls in threads of their own."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], Any]) -> Future[Any]:
    """Make a call in a thread of its own. The process can end even if the call hangs. (It could not
    with a ThreadPoolExecutor.)"""
    future: Future[Any] = Future()
    threading.Thread(target=settle, args=(future, call), daemon=True).start()
    return future


def settle(future: Future[Any], call: Callable[[], Any]) -> None:
    """Give a future what the call returns or raises."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


class SerialCalls:
    """Calls in the background, one after another. The thread is a daemon: if a call hangs, the
    process can end nevertheless."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """The future raises what the call raises."""
        future: Future[T] = Future()
        self._waiting.put(partial(settle, future, call))
        return future

    def close(self) -> None:
        """End the thread behind the calls that wait."""
        self._waiting.put(None)

    def _work(self) -> None:
        while True:
            call = self._waiting.get()
            if call is None:
                return
            call()

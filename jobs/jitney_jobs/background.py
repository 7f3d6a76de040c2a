"""Calls in threads of their own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_background(call: Callable[[], Any]) -> Future[Any]:
    """Make a call in a thread of its own. The process can end even if the call hangs, unlike with a
    thread of an executor."""
    future: Future[Any] = Future()
    threading.Thread(target=settle, args=(future, call), daemon=True).start()
    return future


def settle(future: Future[Any], call: Callable[[], Any]) -> None:
    """Give a future what the call returns or raises."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)

"""SIGTERM is heard while the main thread sits in C, and does not end the process."""

import subprocess
import sys
import textwrap


def test_the_callback_runs_once_though_the_main_thread_runs_no_python() -> None:
    """Once without an error: one that fails is counted, and does not end the thread."""
    program = textwrap.dedent("""
        import os, signal, threading, time
        from jitney.frontend.worker import on_sigterm

        main_in_python = threading.Event()
        heard = []
        errors = []

        def callback():
            if not errors:
                os.kill(os.getpid(), signal.SIGTERM)  # the next one runs it again
                raise ValueError
            heard.append(not main_in_python.is_set())

        on_sigterm(callback, lambda: errors.append(1))

        def kill():
            os.kill(os.getpid(), signal.SIGTERM)
            ends = time.monotonic() + 60
            while not heard and time.monotonic() < ends:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # time enough to call a second time
            lock.release()

        lock = threading.Lock()
        lock.acquire()
        threading.Thread(target=kill).start()
        lock.acquire()  # in C, like the stub's main thread in its message loop
        main_in_python.set()
        print(heard, errors)
    """)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == "[True] [1]"

"""Triton's side of the engine: tensors in, responses out, metrics. The only package that imports
``triton_python_backend_utils``.

Threads of one model instance. They exchange messages; nothing is shared and changed but the
journal, which is under the supervisor's lock. An exception in one of them is counted
(``jitney_thread_errors_total``) and logged, and the thread goes on.

=================  ================================  =========================================
thread             owns                              may block on
=================  ================================  =========================================
the stub's         parsing of new requests           nothing of ours
encoders           two for short prompts, one for    the process that checks grammars
                   long ones, one for new grammars
engine             the supervisor: the engine's      the engine's socket; the responder, while
                   process, its journal              64 reports wait
engine's writer    what goes to the engine           the engine's socket
responder          open requests, their              the server, one send at a time
                   completions, sends
sweeper            the list of open requests, to     the server
                   ask which clients have gone
metrics            the counts, written a few times   the server
                   a second
SIGTERM            the drain: ``drain_s`` seconds    a signal
                   for what is open
=================  ================================  =========================================

A request's times count from its arrival. A send is a round trip to the server; while it lasts, new
tokens gather and leave together. Errors come from the tree in ``errors.py``. They are translated to
the server's codes in one place, and never show a path or a traceback to a client.
"""

"""Triton's side of the engine: tensors in, responses out, metrics. The only package that imports
``triton_python_backend_utils``.

Threads of one model instance. An exception in one of them is counted
(``jitney_thread_errors_total``) and logged, and the thread goes on.

=================  ================================  =========================================
thread             owns                              may block on
=================  ================================  =========================================
the stub's         parsing of new requests           nothing of ours
encoders           encoding: two threads of short    the processes that check grammars
                   prompts, one of long ones, two
                   of new grammars
engine             the supervisor: the engine's      the engine's socket; the responder, while
                   process, its journal              64 reports wait
engine's writer    what goes to the engine           the engine's socket
responder          open requests, their              the server, one send at a time
                   completions, sends
sweeper            the list of open requests, to     the server
                   ask which clients have gone
metrics            the counts, written a few times   the server
                   a second
signals            the drain: begins it, changes     a signal
                   its time, undoes it
=================  ================================  =========================================

The threads exchange messages. Only a few things are changed by several threads, and each has a
lock of its own: the supervisor's journal, the sums in ``ModelMetrics``, a ``Channel``'s sender, the
number of reports that wait, the grammars that were checked.

Two further things need no lock, because each is a single reference that is replaced as a whole:
``Service._final_refusal``, whose last value counts, and the request in ``ClientInputs``, which is
taken once or dropped. ``Health``, ``Service._accepted_bytes`` and ``Responder.ended_bytes`` are
each written by one thread and read by others.

The objects of one request, from the server's call to its last response.

====================  =====================  ====================  =================================
object                made by                owned by              lives until
====================  =====================  ====================  =================================
``InferenceRequest``  the server             the stub's thread     its tensors are read
``ClientRequest``     ``parse_request``      stub, then encoder    the prompt is encoded, or the
                                                                   request has ended
``Channel``           ``Service.accept``     stub, then responder  the final response
``Arrival``           ``Service``, once the  responder             the request has ended
                      checks are passed
``EncodedPrompt``     ``text.intake``        encoder               its ``Reply`` is made
``Submit``            ``text.intake``        engine, journal       the engine's terminal event
``Completion``        ``Service``            responder             the request has ended
``ResponseWriter``    ``Service``            responder             the request has ended
``Reply``             ``Service``, holds     responder             the request has ended
                      the two above
====================  =====================  ====================  =================================

A request's times count from its arrival. A send is a round trip to the server; while it lasts, new
tokens gather and leave together. Errors come from the tree in ``errors.py``. They are translated to
the server's codes in one place, and never show a path or a traceback to a client.
"""

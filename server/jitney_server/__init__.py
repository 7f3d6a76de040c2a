"""The embedded tritonserver, started, watched and stopped; stand-ins for its backends; the doctor.

The ``nvidia-pytriton`` wheel carries the ``tritonserver`` binary; nothing else of it is used.
``installation`` finds its parts and refuses what cannot work. ``server`` assembles a folder of
links (the wheel's python backend, the stub of this Python version, our backend folders), chooses
ports and starts the process in a group of its own.

``stopping``: the launcher sends SIGTERM to the models' processes, unloads every model with the key
that only it has, then ends the server. SIGTERM to the server alone is not enough: it waits for idle
keep-alive connections for its whole exit timeout, and then has no time left to unload. It also
keeps a model loaded while a client holds a gRPC stream open that once carried a request; so the
launcher closes such connections when no request is in flight. What is left of the group is killed,
and the shared memory of that server is removed.

``supervision``: this server does not notice that a model's process has died. Whoever started it
watches it. A model whose process has ended or which does not answer is unloaded at once, which
withdraws its readiness, and loaded again. A server that has ended, does not answer or does not
unload is killed and started again on the same ports. Repairs have growing pauses.

``launch``: clients cannot load or unload models, register shared memory, or change trace and log
settings without the launcher's key. It does not stand on the server's command line.
"""

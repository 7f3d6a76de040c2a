"""The engine: the loop that makes the steps, and the process that it lives in.

In the order in which they are read:

The loop:

- ``engine``: the loop itself. It owns scheduler and runner.
- ``inbox``: what other threads send to the loop.
- ``steps``: how a step is made.

Where a request waits for a grammar or an adapter:

- ``pending``: the requests that wait.
- ``source``: what is asked of a kind of resource. ``grammars`` is one, ``adapters.pool`` another.
- ``making``: the threads that make resources.
- ``make_way``: requests that are taken back, so that another one gets its adapter.

The process that the engine lives in:

- ``handle``: what a front asks of an engine, here or in a process of its own.
- ``supervisor``: the handle that replaces an engine that died.
- ``journal``: the open requests, and for which of them the engine works now. ``blame``: which of
  them ends engines.
- ``start_engine``: how an engine is started. ``load_watch``: whether its load makes progress.
- ``fork_server``: the process from which engines are forked. It has imported torch and transformers
  already, so only the model is loaded anew. It never touches the device.
- ``wire``: what passes between the two processes.
- ``process``: what runs in the fork server and in the engine's process.

Beside these:

- ``loading``: what loading a model gives.
- ``assemble``: the one file that joins execution, kernels, quantization and adapters.
- ``grammar_check``: checks of grammars, in processes that may be killed.
- ``child_process``: what every child process needs.
- ``quiet``: imports without noise.

The engine lives in a process of its own, so that a fault of the device or of a native library takes
no stream with it. The supervisor submits every open request to the next engine with what it has
emitted; the request resumes there as a preempted one does. In bfloat16 a prefill and the decodes
that it replaces round differently. So after a resumption, as after a preemption, another token may
be sampled where two were almost equally likely.

The cache keeps its size: the next engine gets as many bytes as the first one, because the requests
that the first one admitted must fit into the next.

When the front dies, fork server and engine end too. The kernel sends them SIGKILL when their parent
ends. A process that the signal does not reach ends when its socket closes.
"""

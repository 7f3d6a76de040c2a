"""The engine: the loop that makes the steps, and the process that it lives in.

In the order in which they are read:

- ``engine``: the loop. It owns scheduler and runner.
- ``inbox``, ``steps``: what other threads send to the loop; how a step is made.
- ``pending``, ``grammars``: where a request waits for a grammar or an adapter.
- ``handle``: what a front asks of an engine, here or in a process of its own.
- ``wire``, ``process``: what passes between the two processes; what runs in the engine's process.
- ``journal``, ``supervisor``: what is open, and how an engine that died is replaced.
- ``fork_server``: the process from which engines are forked. It has imported torch and transformers
  already, so only the model is loaded anew. It never touches the device.
- ``start_engine``, ``load_watch``: how an engine is started; whether its load makes progress.
- ``child_process``, ``grammar_check``, ``quiet``: what a child process needs; a check in a process
  that may be killed; imports without noise.
- ``loading``, ``assemble``: what loading a model gives; the one file that joins execution, kernels,
  quantization and adapters.

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

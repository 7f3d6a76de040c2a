"""The engine: the loop that makes the steps, and the process that it lives in.

In the order in which they are read:

- ``engine``: the loop. It owns scheduler and runner, and makes the steps.
- ``pending``, ``grammars``: where a request waits for a grammar or an adapter.
- ``handle``: what a front asks of an engine, here or in a process of its own.
- ``wire``, ``process``: what passes between the two processes; what runs in the engine's.
- ``journal``, ``supervisor``: what is open, and how an engine that died is replaced.
- ``fork_server``: the process that makes engines fast. It has imported torch and transformers, and
  forks when asked, so only the model is loaded anew. It never touches the device.
- ``grammar_check``, ``quiet``: a check in a process that may be killed; imports without noise.
- ``assemble``: the one file that knows execution, kernels, quantization and adapters.

The engine lives in a process of its own, so that a fault of the device or of a native library takes
no stream with it. The supervisor submits every open request to the next engine with what it has
emitted; it resumes there as a preempted request does. In bfloat16 a prefill rounds otherwise than
decodes do: after a resumption, as after a preemption, a near tie may fall the other way.

The cache keeps its size: the next engine gets the first one's bytes, because what was admitted must
fit again. The front's own death ends fork server and engine: the kernel sends them SIGKILL with
their parent, and each ends when its socket closes.
"""

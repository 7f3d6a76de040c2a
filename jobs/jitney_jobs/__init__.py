"""Jobs: data in, data out, each row once. ``jitney batch``, and the batches of the gateway.

A job over files is a pipeline whose every queue is bounded. A thread reads chunks (``dataset``),
processes prepare their rows (``prepare``, with the tasks of ``generate`` and ``tensors``), the
job's own thread keeps the executor filled (``pipeline``, ``executors``, ``asking``), and another
thread writes parts (``output``). ``job`` holds the settings, ``run`` puts all of it together,
``worker`` runs the job files of a folder.

A row is known by its file and its index there. The journal is written before the model is loaded.
A part is written, synced, renamed, and then noted in the journal with its rows; only then does it
count. So whatever ends the process, the next one removes what the journal does not name, and reads
the rows that it lacks.
"""

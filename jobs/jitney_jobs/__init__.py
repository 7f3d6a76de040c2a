"""Jobs: data in, data out, each row once. ``jitney batch``, and the batches of the gateway.

A job over files is a pipeline whose every queue is bounded:

- a thread reads chunks of rows (``dataset``, with ``input_files``, ``file_batches``, ``storage``
  and ``rows``);
- processes prepare their rows (``prepare_workers``, ``prepare``, with the tasks of ``tasks``,
  ``generate`` and ``tensors``);
- the job's own thread keeps the executor filled (``pipeline``, ``row_runner``, ``feeder``,
  ``executors``, ``asking``) and gathers the results into parts (``finished_rows``,
  ``part_filler``);
- another thread writes the parts (``part_maker``, ``part_files``) and commits them (``output``).

``job`` holds the settings, and ``job_making`` checks them. ``run`` puts all of it together,
``job_run`` is a run from its first row to its end, and ``worker`` runs the job files of a folder.
``run_meter`` measures a run, and ``observer`` shows it. ``job_record`` reads what the journal says
afterwards; ``status`` and ``report`` tell it (``job_figures``).

``ray_pipeline`` runs a job on a cluster (``ray_cluster``, ``ray_stream``), whose actors have what
is between a reader and a commit (``ray_actor``); rows come to them in blocks (``ray_reader``,
``ray_blocks``), and what they tell lies on a board (``ray_board``). ``shard_planning`` divides a
job into shards, which share a plan (``shard_plan``), and ``merging`` makes one job of them again.

``outcome`` judges what goes wrong, and ``preview`` checks columns before anything runs.
``fingerprints``, ``job_differences`` and ``input_changes`` tell what has changed between two runs
of a job, and ``changed_input`` what a run does about it.

A row is known by its file and its index there. The journal is written before the model is loaded
(``journal``, with ``journal_entries``, ``journal_record``, ``journal_file`` and
``journal_objects``). A part is written, synced, renamed (on object storage: put), and then noted in
the journal with its rows; only then does it count. So whatever ends the process, the next one
removes what the journal does not name, and reads the rows that it lacks.
"""

"""Three commands: ``jitney bench`` measures a running server, ``jitney tune`` finds the batching of
a model, and ``jitney plan`` says what a model needs of a device's memory.

- ``bench`` is the first command. ``options`` are those that it shares with ``tune``, and ``loads``
  the loads that they ask for.
- ``target`` is the server under test, and ``server_counts`` what it counts itself. ``inputs`` makes
  the requests, ``perf_analyzer`` sends them, and ``exchanges`` computes the figures from what it
  exports. ``slo`` judges them by the bounds.
- ``record`` holds all results, and is what the JSON files hold.
- ``tune`` is the second command: ``subject`` is the model that is tuned, ``axes`` are the settings
  to try, ``tuner`` tries them, and ``choose`` compares them.
- ``report`` makes the pages of both from ``plots`` and the parts in ``pages``.
- ``plan_command`` is the third command: ``lengths`` of requests, ``planning`` chooses the sizes by
  ``sizing`` (arithmetic) and ``simulation`` (the real scheduler), and ``plan_tables`` prints them.
"""

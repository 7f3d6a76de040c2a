"""The embedded tritonserver: started, watched and stopped. Stand-ins for its backends; the doctor.

The ``nvidia-pytriton`` wheel carries the ``tritonserver`` binary; nothing else of it is used.

- ``installation`` finds the wheel's parts and refuses what cannot work.
- ``server`` starts the process, over a folder of links to the backends: ``command_line`` says with
  which options, ``repository`` with which models, ``log_file`` holds what it prints.
- ``launch`` keeps the key of the restricted endpoints off the command line, and ``admin`` uses
  these endpoints. ``stacks`` says how large the server's stacks are.
- ``group_guard`` kills what a dead server leaves running, ``leftovers`` removes the files that it
  leaves on this machine.
- ``start_failure`` and ``starting_stubs`` find out why a start fails.
- ``interruptible`` is how a command is asked to stop. ``stopping`` unloads the models and ends the
  server without losing a request. ``connections`` closes the connections of its clients.
- ``supervision`` loads a model again whose process has died, and starts a dead server again. The
  processes of models are ``stubs``.
- ``serving`` and ``doctor`` are the commands ``jitney serve`` and ``jitney doctor``. Of the first,
  ``welcome`` is what it prints, and ``gateway_process`` the gateway beside the server.
"""

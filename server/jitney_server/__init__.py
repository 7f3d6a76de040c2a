"""The embedded tritonserver: started, watched and stopped. Stand-ins for its backends; the doctor.

The ``nvidia-pytriton`` wheel carries the ``tritonserver`` binary; nothing else of it is used.

- ``installation`` finds the wheel's parts and refuses what cannot work.
- ``server`` starts the process, over a folder of links to the backends: ``command_line`` says with
  which options, ``repository`` with which models, ``log_file`` holds what it prints.
- ``launch`` keeps the key of the restricted endpoints off the command line, and ``admin`` uses
  these endpoints.
- ``start_failure`` and ``starting_stubs`` find out why a start fails.
- ``stopping`` unloads the models and ends the server without losing a request. ``connections``
  closes the connections of its clients.
- ``supervision`` loads a model again whose process has died, and starts a dead server again.
- ``leftovers`` removes what a server has on this machine, also after it was killed.
- ``serving`` and ``doctor`` are the commands ``jitney serve`` and ``jitney doctor``. Of the first,
  ``welcome`` is what it prints, and ``gateway_process`` the gateway beside the server.
"""

"""The embedded tritonserver: started, watched and stopped. Stand-ins for its backends; the doctor.

The ``nvidia-pytriton`` wheel carries the ``tritonserver`` binary; nothing else of it is used.

- ``installation`` finds the wheel's parts and refuses what cannot work.
- ``server`` starts the process, over a folder of links to the backends. ``launch`` keeps the key of
  its restricted endpoints off the command line, and ``admin`` uses these endpoints.
- ``stopping`` unloads the models and ends the server without losing a request.
- ``supervision`` loads a model again whose process has died, and starts a dead server again.
- ``serving`` and ``doctor`` are the commands ``jitney serve`` and ``jitney doctor``.
"""

"""The signals by which a launcher tells the models' processes that their server stops.

``jitney_server.stopping`` sends them, ``frontend.termination`` hears them. A process that knows
nothing of them, such as another model's, ignores the last two by default.
"""

import signal

STOPS = signal.SIGTERM
"""The server stops. It may come from anybody: nobody need be there who keeps the time."""
TIME_IS_KEPT = signal.SIGURG
"""The launcher stops the server, and tells when the time for running requests is over."""
TIME_IS_OVER = signal.SIGWINCH
"""What is still open must end now. Counts only after TIME_IS_KEPT: a terminal sends it, too."""

"""``jitney tune``: which batching a model should be served with, found by measuring it.

    command     the command line
    tuner       a run from start to end: current setting, search, refinement, the best once more
    setting     the axes of a model, and a setting as one value of each
    candidates  the values to be tried, from the options or from the model's configuration
    subject     the model as its config.pbtxt has it; a setting as a configuration and as its lines
    search      which setting next
    ladder      which load of a setting next
    choose      how good a setting was; what is said at the end
    budget      how long it takes, and what fits into the time given
    session     the server, and the model loaded with one setting after the other
    measure     one setting under load, through the parts of ``sweep``
    record      what the JSON file holds
    report      the page and the terminal's table

``setting`` to ``budget`` are pure: no server, no clock. The user's repository is only read.
"""

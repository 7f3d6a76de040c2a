"""``jitney bench``: perf_analyzer over a range of loads against a running server, and a report.

    command   the command line
    sweep     a run from start to end: which load next, what goes on the terminal
    plan      which loads, and how long each is kept up
    inputs    what the requests carry: prompts, rows
    access    how a client gets in: TLS, headers, keys
    target    the server under test: what it says of a model
    counters  its statistics and metrics, before and after
    tool      finds perf_analyzer
    point     one load: warm up, run, read
    profile   perf_analyzer's export -> moments -> figures
    slo       bounds, verdicts, the best setting
    record    the result, as it stands in the JSON file
    figures, report, compare: pictures and pages of one result, or of two

Only the server's public addresses are used, so the server may be any Triton; nothing here imports
torch or a client library of Triton's.
"""

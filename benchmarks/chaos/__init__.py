"""Every process of a served model is killed under load: what do its clients hear, and what is left
on the machine? ``python -m benchmarks.chaos`` says how it is run.

- ``workload``: the requests, and the model that they ask.
- ``launcher``: ``jitney serve`` and the processes below it.
- ``clients``: four ways to ask, and what a client has heard.
- ``verdict``: judges what was heard. Pure.
- ``census``: counts what a run has on the machine.
- ``waves``: requests, a kill in the middle of them, and the checks after it.
"""

"""Text to token ids and back: tokenizer, chats, stop strings, grammars, one request's output.

``intake`` is the way in and ``completion`` the way out. ``grammar`` alone knows llguidance. In
front each new grammar is checked by a process of its own (``grammar_process``), which is killed if
it takes too long; what comes back goes into the ``Submit``, and the engine compiles it. Each
sequence has a ``GrammarState`` of ``messages.py``, which follows from its output alone: so a fork
begins with a new one, and a resumed sequence has it accept its output again.
"""

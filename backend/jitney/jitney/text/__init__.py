"""Text to token ids and back: tokenizer, chats, stop strings, grammars, one request's output.

``intake`` is the way in and ``completion`` the way out.

``grammar`` alone knows llguidance. A new grammar is first checked in a process of its own
(``grammar_process``), which the front kills if that takes too long. What the check returns travels
in the ``Submit``, and the engine compiles it. Each sequence then has a ``GrammarState`` (declared
in ``jitney.batch``), which says what tokens may come next. The state follows from the sequence's
output alone. A fork has no output yet, so it begins with a new state, and a resumed sequence has a
new state accept its output again.

A grammar on its way:

========================  ======================================  ===============================
form                      where                                   made from the one above by
========================  ======================================  ===============================
``StructuredOutputs``     a request's parameters                  the client
a text for llguidance     ``Submit.grammar``                      ``prove_grammar``, in the process
                                                                  of ``GrammarChecker``
``CompiledGrammar``       the engine; a ``batch.Grammar``         ``GrammarCompiler``
``MatcherState``          one sequence; a ``batch.GrammarState``  ``CompiledGrammar.begin``
========================  ======================================  ===============================
"""

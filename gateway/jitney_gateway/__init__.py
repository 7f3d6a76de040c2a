"""The gateway: OpenAI's and Anthropic's APIs over HTTP, in a process of its own.

It asks the models of a Triton server over gRPC. A request for a language model passes these modules
in this order; those in brackets are what they use:

1. ``run_gateway`` starts the process, ``app`` makes the routes, and ``gateway`` answers every
   request (``keys``, ``request_body``, ``refusals``, ``http_answers``, ``client_fields``,
   ``gateway_metrics``).
2. ``wire`` decodes the body into a record (``field_rules``). ``responses_request`` and
   ``messages_request`` have the bodies of their APIs, and make a chat of them (``earlier_turns``,
   ``typed_fields``).
3. ``language`` has the endpoints, and ``generation`` what they have in common with jobs that run
   such bodies without a server. ``without_effect`` leaves out what the model cannot honour.
   ``answer_formats`` finds how the model writes calls and reasoning (``formats``,
   ``format_detection``).
4. ``server_request`` makes the model's inputs and sampling parameters (``chat``,
   ``texts_or_ids``). ``chat_constraint`` makes the grammar that the answer must keep (``lark``).
   ``structured`` reads what the client says. ``tool_grammar`` is for calls that must come,
   ``strict_grammar`` for calls that may come (``argument_grammar``, ``value_grammar``,
   ``string_rules``, ``schema_alternatives``), and ``reasoning_grammar`` for what comes before.
5. ``server_client`` sends it (``server_connection``, ``ended_streams``) and gives steps back
   (``model_steps``).
6. A parser makes pieces of the text of the steps: ``parsers``, or ``harmony`` for gpt-oss
   (``answer_parser``, ``call_heads``, ``call_body``, ``argument_readers``). ``content_blocks``
   makes blocks of the pieces.
7. ``chat_answer``, ``completion_answer``, ``responses_answer`` and ``messages_answer`` write the
   blocks in the form of their API (``answers``), and ``event_stream`` sends them.

Beside them stand ``pooling`` (models that embed, classify or rank; ``embedding_answer``),
``document`` (what an endpoint is), ``mounting`` (endpoints of other packages), ``server_load`` and
``tracing_middleware``.

Words for parts of a chat, in the order in which a request meets them:

===================  ========================  ====================================================
word                 whose                     what it is
===================  ========================  ====================================================
``ContentPart``      the client's (``wire``)   a part of a message in ``/v1/chat/completions``
``TextPart``         the client's (``wire``)   a part of a text in the two other APIs
``InputItem``        the client's              an item of the input in ``/v1/responses``
``InputTurn``        the client's              a turn in ``/v1/messages``, which has ``InputBlock``
``AssistantPart``    ours (from the two above) a part of what the model said earlier
``Piece``            ours (``parsers``)        what new text of the model adds
``ContentBlock``     ours (from pieces)        a stretch of text or reasoning, or a call
``BlockEvent``       ours (from pieces)        a block begins, grows or ends
===================  ========================  ====================================================
"""

"""The gateway: OpenAI's and Anthropic's APIs over HTTP, in a process of its own.

It asks the models of a Triton server over gRPC. ``run_gateway`` starts the process, ``app`` has
the endpoints and ``server_client`` the connection to the server.

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

An answer (``answers``, ``messages_answer``, ``responses_answer``) writes blocks and their events in
the form of one API.
"""

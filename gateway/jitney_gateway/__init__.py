"""The gateway: OpenAI's and Anthropic's APIs over HTTP, in a process of its own.

It asks the models of a Triton server over gRPC. ``run_gateway`` starts the process, ``app`` has
the endpoints and ``server_client`` the connection to the server.
"""

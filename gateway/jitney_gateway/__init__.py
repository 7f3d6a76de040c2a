"""The OpenAI face: a process of its own, which speaks gRPC to the models of a server."""

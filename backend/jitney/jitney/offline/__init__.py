"""The engine without a server."""

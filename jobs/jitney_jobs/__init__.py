"""The engine without a server, and jobs over files."""

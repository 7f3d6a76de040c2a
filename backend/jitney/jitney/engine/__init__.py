"""The engine: the loop that makes the steps, and the one place where its parts are chosen."""

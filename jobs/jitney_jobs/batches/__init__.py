"""OpenAI's files and batches, kept in a folder and mounted into the gateway. Jobs do the work."""

"""Files and batches of OpenAI's API on a folder, mounted into the gateway: whose work is jobs."""

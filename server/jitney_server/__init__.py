"""The embedded tritonserver: found, started, asked, stopped."""

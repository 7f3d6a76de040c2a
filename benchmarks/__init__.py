"""Benchmarks. A package with a file of its own, so that no installed namesake takes its place."""

"""Benchmarks: one script per question, run as ``python -m benchmarks.NAME``."""

"""Benchmarks: each module is a command (``python -m benchmarks.NAME``) or a part of one."""

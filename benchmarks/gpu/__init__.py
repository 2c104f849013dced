"""Checks and measures everything that needs a GPU: `python -m benchmarks.gpu.checklist`."""

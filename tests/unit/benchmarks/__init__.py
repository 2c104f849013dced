"""Unit tests of what benchmarks compute from what they measure."""

"""Frozen dataclasses that hold a run's configuration, and the rules that check them together. No torch."""

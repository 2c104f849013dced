"""Shared code of the programs in tools/: opening a saved model, measuring layouts."""

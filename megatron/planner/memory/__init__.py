"""Predicts the peak memory of every pipeline rank of a run."""

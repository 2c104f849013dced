"""Comparisons with Megatron-LM itself, by hand: its sources are not part of this project."""

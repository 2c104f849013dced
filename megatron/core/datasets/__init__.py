"""Indexed token files, samples, blends, tokenizers, samplers."""

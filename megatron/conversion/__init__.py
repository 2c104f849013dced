"""Converts models between formats, and compares a converted model with the original."""

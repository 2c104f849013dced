"""Layers with a mixture of experts."""

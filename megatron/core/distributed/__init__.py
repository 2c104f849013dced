"""Gradient buffers and data-parallel reduction."""

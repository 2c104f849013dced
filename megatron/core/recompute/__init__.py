"""Activation recompute, and a count of the bytes that a forward saves."""

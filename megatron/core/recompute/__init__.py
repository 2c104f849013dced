"""Activation recompute, and the measure of what a forward saves."""

"""Computes the memory and the schedule of a layout from its flags, before anything is started. No torch."""

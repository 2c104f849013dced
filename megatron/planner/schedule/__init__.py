"""Draws and reports pipeline schedules."""

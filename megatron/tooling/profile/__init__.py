"""Measures a machine for the planner: tools/profile_machine.py."""

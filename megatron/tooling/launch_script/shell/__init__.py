"""Reads bash scripts without running them: their text, the values of their variables, and the commands they would
start.
"""

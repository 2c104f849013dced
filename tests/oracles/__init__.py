"""Comparisons with other programs that are installed apart, run by hand."""

"""Hosts emulated on one machine, and what is measured on them. Needs root and iproute2."""

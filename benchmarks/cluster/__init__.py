"""Benchmarks on hosts that are emulated on one machine. They need root and iproute2."""

"""Foundations used by every other package: exceptions, logging, rank arithmetic, the heartbeat and tensor slices."""

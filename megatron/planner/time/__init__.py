"""The time of a training step, computed from the flags, the cluster and a few constants."""

"""Log lines, metrics, timers and progress of a run."""

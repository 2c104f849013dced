"""One file per family of schedules: functions from sizes to lists of computations, and their specs."""

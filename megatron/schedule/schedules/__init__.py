"""One file a family of schedules: functions from sizes to a Schedule that holds computation only."""

"""Pipeline schedules as data: stages, lists of actions, passes, checks and a simulator. No torch."""

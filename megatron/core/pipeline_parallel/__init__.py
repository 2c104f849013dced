"""Pipeline schedules as data, and the engine that runs them."""

"""`--dry-run`: the first step of a run on any number of ranks, traced without a device,
without data and without memory."""

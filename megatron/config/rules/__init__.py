"""Named cross-checks of a run's configuration, a file per subject."""

"""Model families: what the config.json of each has of its own, and how its tensors are called."""

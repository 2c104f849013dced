"""One GPT decoder; a file a family for presets."""

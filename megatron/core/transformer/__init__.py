"""The decoder layer and its parts; no collectives of its own."""

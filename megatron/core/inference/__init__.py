"""Generation with a KV cache."""

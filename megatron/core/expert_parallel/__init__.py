"""The exchange of tokens between the ranks that share the experts of a layer."""

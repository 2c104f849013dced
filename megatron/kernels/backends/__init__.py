"""The only optional imports of the tree."""

"""Models from one format to another, and the comparison of both."""

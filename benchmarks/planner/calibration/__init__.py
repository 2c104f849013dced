"""Published runs of any framework as rows of a table: their prediction, and the fit of the constants."""

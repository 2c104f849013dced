"""One file per operation: the torch reference and the choice of the backend."""

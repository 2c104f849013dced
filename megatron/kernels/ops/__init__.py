"""One file an op: the torch reference and the choice of backend."""

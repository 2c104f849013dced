"""Every collective of the tree, with its autograd functions, recorder and time limits."""

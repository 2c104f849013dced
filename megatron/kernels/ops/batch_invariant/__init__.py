"""Kernels whose result for a token depends neither on the other tokens of the call, nor on their number or place.

[Note: fixed shapes] A library picks its algorithm, and with it the order of a sum, by the shape of a product. So each
product here has one shape, whatever the number of tokens: rows are taken in blocks of a fixed height, and the last
block is padded with zeros. Inside a block, a row's result does not depend on its place or on the other rows. Two more
things would let neighbours decide: a loop over elements computes those behind its last full vector by another
approximation of the exponential function, so functions that have such a loop in torch are composed of operations whose
results are the same either way; and the sum of a single row is split between threads, where those of several rows are
not. kernels/choose_invariant.py tries all of this with the shapes of the model before a run relies on it.
"""

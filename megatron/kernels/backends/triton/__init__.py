"""Fused kernels in Triton (Tillet et al., MAPL 2019). Each file has the interface of its reference in kernels/ops.

They are imported only where Triton is installed. Numbers are rounded where the reference rounds, sums are in fp32 and
in a fixed order that does not depend on the GPU, and nothing is added atomically: the same input gives the same bits.
"""

"""Asynchronous work: CUDA streams with events, or threads on the CPU, under one interface."""

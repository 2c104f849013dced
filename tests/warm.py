"""For a process that test processes are forked from: it imports torch, and what torch imports when it is first used."""

import os

# Asking whether there is a GPU would otherwise start CUDA, which does not survive a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

torch.set_num_threads(1)  # before the first fork: no pool of threads may exist in the parent
torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports torch's compiler, for a second or two

"""What every test of this folder needs to say."""

import pytest
import torch

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"),
]
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")  # as their tensors name them

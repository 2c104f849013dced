"""What carries messages on which device."""

import pytest
import torch

from megatron.core.groups import backend_for


@pytest.mark.parametrize(
    ("device", "asked", "taken"),
    [
        ("cpu", None, "gloo"),
        ("cpu", "gloo", "gloo"),
        ("cpu", "nccl", "gloo"),  # which real command lines give everywhere; the table at start-up says so
        ("cuda", None, "nccl"),
        ("cuda", "nccl", "nccl"),
        ("cuda", "gloo", "gloo"),
    ],
)
def test_backend_for(device, asked, taken):
    assert backend_for(torch.device(device), asked) == taken

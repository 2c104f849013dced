"""Recompute on CUDA: random numbers drawn in autograd's own thread, flash attention, what is kept."""

import pytest
import torch

from megatron.config.recompute import KEEP_ALL
from megatron.core.transformer.context import Positions
from tests import pool
from tests.gpu.cuda import CUDA, NEEDS_CUDA
from tests.unit.models.builds import GPT, LLAMA, backward, gradients, losses, make_data_parallel, make_ids, make_model
from tests.unit.recompute.test_rerun import DROPOUT, MODES, UNFUSED
from tests.unit.spec import planned

pytestmark = NEEDS_CUDA
# Without atomics in a backward, so that bits can be compared.
MODELS = {"llama": {**LLAMA, **UNFUSED, **DROPOUT}, "gpt, bf16": {**GPT, **UNFUSED, **DROPOUT, "bf16": True}}
FLASH = {**LLAMA, "bf16": True, "hidden_size": 256, "num_attention_heads": 4}


def trained(fields, recompute):
    """Loss and gradients; weights are made on the CPU."""
    groups = pool.groups()
    model = make_model(fields, groups, device=CUDA, recompute=recompute).train()
    model.load_state_dict(make_model(fields, groups, spread=0.3).state_dict())
    data_parallel = make_data_parallel(model, groups)
    loss = losses(model, make_ids(4, 32).to(CUDA))
    backward(data_parallel, loss.sum())
    return loss.detach(), gradients(data_parallel)


# A norm that is computed again is no longer fused with the addition of the gradients behind it, which is rounded then.
UNFUSED_NORMS = ("GEMM-last", "all parts")


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_the_same_bits(fields):
    expected = trained(fields, KEEP_ALL)
    for mode, recompute in MODES.items():
        found = trained(fields, recompute)
        assert found[0].equal(expected[0]), mode
        for name, gradient in expected[1].items():
            step = torch.finfo(torch.bfloat16 if fields.get("bf16") else torch.float32).eps
            limit = 8 * step * gradient.norm() if mode in UNFUSED_NORMS else 0.0
            assert (found[1][name] - gradient).norm() <= limit, (mode, name)


def test_flash_attention():
    """Its forward is the same bits again; its backward may add in another order."""
    expected = trained(FLASH, KEEP_ALL)
    for mode, recompute in MODES.items():
        found = trained(FLASH, recompute)
        assert found[0].equal(expected[0]), mode
        for name, gradient in expected[1].items():
            assert (found[1][name] - gradient).norm() <= 2.0**-7 * gradient.norm(), (mode, name)


def test_planned_bytes_are_kept():
    """Memory that the layers' forward leaves allocated, up to the allocator's blocks and what flash keeps of its
    state."""
    b, t = 4, 512
    fields = {**FLASH, "num_layers": 3, "max_position_embeddings": t}
    for mode in ("none", "GEMM-last", "full, uniform 1"):
        recompute = {"none": KEEP_ALL, **MODES}[mode]
        model = make_model(fields, pool.groups(), device=CUDA, recompute=recompute).train()
        hidden = torch.randn(t, b, 256, device=CUDA, dtype=torch.bfloat16)
        tables = model._tables(torch.arange(t, device=CUDA).unsqueeze(0), t)

        def forward(model=model, hidden=hidden, tables=tables):
            # The stack's input is made in here, as an embedding makes it: it is kept, too.
            x = hidden.clone().requires_grad_()
            return model.decoder(x, Positions(tables, None), layers=range(3), final_norm=False)

        forward().sum().backward()  # workspaces
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        out = forward()
        found = torch.cuda.memory_allocated() - before - out.nbytes
        config = model._build.config
        kept = planned.kept_by_layers(config, planned.sizes_for(config, planned.CUDA, t, b), recompute, range(3))
        assert kept <= found <= kept + 3 * 20 * 512, mode

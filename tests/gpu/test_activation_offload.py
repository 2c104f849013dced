"""Activation offload on CUDA: streams, page-locked memory of exact size, the same bits, and less memory."""

import pytest
import torch

from megatron.core.offload.activations import ActivationOffload, attach_to_layers
from megatron.core.offload.bandwidth import measure_bandwidth
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.offload.policies import ByModules, ByRatio, ChosenLayers
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from tests import pool
from tests.gpu.cuda import CUDA, NEEDS_CUDA
from tests.unit.models.builds import LLAMA, losses, make_ids, make_model

pytestmark = NEEDS_CUDA
LAYERS, LENGTH = 6, 512
FIELDS = {
    **LLAMA,
    "num_layers": LAYERS,
    "hidden_size": 512,
    "ffn_hidden_size": 1024,
    "max_position_embeddings": LENGTH,
    "hidden_dropout": 0.1,
}


def run(policy, whole=False, steps=3):
    """(gradients, peak bytes of the last step above its beginning, blocks by step). `whole`: moved by actions."""
    model = make_model(FIELDS, pool.groups(), device=CUDA)
    layers = list(model.decoder.layers.values())
    host_pool = HostPool(pinned=True)
    offload = ActivationOffload(policy, CopyEngine(Streams(CUDA, Timeline(CUDA))), host_pool, model, {0: LAYERS}, CUDA)
    attach_to_layers(offload, layers)
    if isinstance(policy, ByModules):
        policy.attach(layers)
    ids, made, peak = make_ids(2, LENGTH).to(CUDA), [], 0
    for _ in range(steps):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begun = torch.cuda.memory_allocated()
        offload.begin_step(frozenset({(0, 0)} if whole else ()), [ids])
        with offload.forward(0, 0, None):
            loss = losses(model, ids).sum()
        if whole:
            offload.offload(0, 0)
            for _ in range(2):
                offload.begin_backward()
            garbage = torch.full((1 << 24,), 7.0, device=CUDA)  # lands where near memory was given up
            del garbage
            offload.reload(0, 0)
        offload.begin_backward()
        loss.backward()
        offload.end_step()
        peak = torch.cuda.max_memory_allocated() - begun
        made.append(host_pool.num_allocated)
    return [p.grad.clone() for p in model.parameters()], peak, made


@pytest.fixture(scope="module")
def reference():
    return run(ByRatio(0.0))


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("whole", [True, False])
def test_a_ratio_changes_no_bit(ratio, whole, reference):
    gradients, _, made = run(ByRatio(ratio), whole)
    assert all(map(torch.equal, gradients, reference[0]))
    assert made[0] > 0 and made[0] == made[-1], "no page is locked after the first step"


@pytest.mark.parametrize("policy", [ChosenLayers({0: range(LAYERS - 2)}), ByModules(["core_attn", "mlp_act"])])
def test_layers_and_modules_change_no_bit(policy, reference):
    gradients, peak, _ = run(policy)
    assert all(map(torch.equal, gradients, reference[0]))
    assert peak < reference[1]


def test_layers_that_move_give_up_memory_during_the_forward(reference):
    """Four of six layers are away when the forward ends."""
    assert run(ByRatio(1.0))[1] < 0.75 * reference[1]


def test_what_came_back_and_is_never_read_harms_nobody():
    """Its memory is freed while the copy may be under way: nothing else may be given it before."""
    engine, host_pool = CopyEngine(Streams(CUDA, Timeline(CUDA))), HostPool(pinned=True)
    n = 1 << 28
    block = host_pool.take(n)
    block.bytes.fill_(9)
    for _ in range(3):
        near = torch.empty(n, dtype=torch.uint8, device=CUDA)
        engine.to_device("unread", [(block.bytes, near)], block)
        del near
        other = torch.zeros(n, dtype=torch.uint8, device=CUDA)
        torch.cuda.synchronize()
        assert not other.any()


def test_blocks_are_pinned_exact_and_unpinned_with_the_pool():
    host_pool = HostPool(pinned=True)
    block = host_pool.take(1_000_003)
    assert block.bytes.is_pinned() and block.bytes.numel() == 1_000_003
    host_pool.discard(block)
    del block
    again = host_pool.take(1_000_003)
    assert again.bytes.is_pinned()


def test_bandwidth_is_measured():
    out, back = measure_bandwidth(CopyEngine(Streams(CUDA, Timeline(CUDA))), HostPool(pinned=True), CUDA)
    assert out > 1e9 and back > 1e9

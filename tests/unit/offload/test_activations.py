"""Offloaded storages: which bytes are offloaded, and what is reloaded."""

import gc
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.config.activation_offload import OFFLOAD_MODULES
from megatron.core.offload.activations import ActivationOffload, attach_to_layers
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.offload.policies import ByModules, ByRatio, ChosenLayers
from megatron.core.offload.saved_tensors import split
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from tests import pool
from tests.unit.models.builds import LLAMA, losses, make_ids, make_model
from tests.unit.offload.live_bytes import LiveBytes

CPU = torch.device("cpu")
WHOLE = frozenset({(0, 0)})


def make(model=None, ratio=1.0, layers=1, policy=None, moved=WHOLE, batch=()):
    offload = ActivationOffload(
        policy or ByRatio(ratio),
        CopyEngine(Streams(CPU, Timeline(CPU))),
        HostPool(pinned=False),
        model or nn.Module(),
        {0: layers},
        CPU,
    )
    offload.begin_step(moved, batch)
    return offload


def away(offload, forward, received=None):
    """The result of `forward`, of which a ratio has left near memory."""
    with offload.forward(0, 0, received) as inside:
        out = forward(inside)
    offload.offload(0, 0)
    for _ in range(2):
        offload.begin_backward()  # of others
    return out


def storages(*tensors):
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


@pytest.mark.parametrize(
    ("sizes", "nbytes", "heads"),
    [
        ([10, 30, 20], 0, [0, 0, 0]),
        ([10, 30, 20], 60, [10, 30, 20]),
        ([10, 30, 20], 30, [0, 30, 0]),
        ([10, 30, 20], 35, [5, 30, 0]),
        ([10, 30, 20], 9, [9, 0, 0]),
        ([10, 30, 20], 59, [9, 30, 20]),
        ([7, 7, 7], 8, [0, 1, 7]),
    ],
)
def test_exactly_so_many_bytes(sizes, nbytes, heads):
    found = split(sizes, nbytes)
    assert sum(found) == nbytes and sorted(found) == sorted(heads)
    assert sum(0 < head < size for head, size in zip(found, sizes, strict=True)) <= 1


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1 / 3, 0.5, 0.999, 1.0])
def test_a_ratio_is_met_to_the_byte_and_the_rest_stays(ratio):
    x = torch.randn(101, requires_grad=True)
    expected = torch.autograd.grad((x.exp() * x.sin()).tanh().sum(), x)[0]
    offload = make(ratio=ratio, batch=(x,))
    with LiveBytes() as live:
        out = away(offload, lambda _: (x.exp() * x.sin()).tanh().sum())
        saved = offload.saved_bytes[0]
        assert offload.offloaded_bytes == int(ratio * saved)
        assert saved - offload.offloaded_bytes <= live.now <= saved - offload.offloaded_bytes + 8
    offload.reload(0, 0)
    out.backward()
    assert torch.equal(x.grad, expected)


class TestStorages:
    def test_views_count_once_and_keep_their_strides(self):
        """Two slices of one product, one of them strided, and a transposed view of it."""
        w = torch.randn(8, 12, requires_grad=True)

        def forward(_):
            fused = torch.ones(4, 8) @ w
            left, right = fused[:, :6], fused[:, 6:]
            return (left * right).sum() + (fused.t() @ fused).sum()

        expected = torch.autograd.grad(forward(None), w)[0]
        offload = make(ratio=0.5)
        out = away(offload, forward)
        assert offload.saved_bytes[0] == 4 * (4 * 8 + 4 * 12), "the ones, and the product once"
        offload.reload(0, 0)
        out.backward()
        assert torch.equal(w.grad, expected)

    def test_parameters_their_views_and_the_batch_stay(self):
        model = nn.Linear(6, 6, bias=False)
        bucket = torch.randn(100)
        model.weight.data = bucket[20:56].view(6, 6)
        batch = torch.randn(5, 6)
        offload = make(model, batch=(batch,))
        out = away(offload, lambda _: (model(batch) * model.weight.t()[0]).sum())
        assert offload.saved_bytes[0] == 5 * 6 * 4, "what the product made, and no more"
        offload.reload(0, 0)
        out.backward()
        assert model.weight.grad is not None

    def test_near_memory_is_freed_though_somebody_took_part(self):
        """The output is on its way to another rank while its group goes out: it is not freed, and nothing is
        changed."""
        x = torch.ones(64, requires_grad=True)
        sent = []

        def forward(_):
            y = x.exp()
            sent.append(y.detach())
            return y.sin().sum()

        offload = make()
        kept = storages()
        out = away(offload, forward)
        assert torch.equal(sent[0], torch.ones(64).exp()), "a storage is never resized"
        kept = storages(sent.pop())
        gc.collect()
        assert kept[0].expired(), "with the message the last of it has gone"
        offload.reload(0, 0)
        out.backward()
        assert torch.equal(x.grad, torch.ones(64).exp().cos() * torch.ones(64).exp())

    def test_a_saved_tensor_may_be_overwritten_by_its_own_backward(self):
        """As the cross entropy does with its logits."""

        class Overwrites(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.sum()

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return x.mul_(2.0)

        x = torch.randn(33, requires_grad=True)
        offload = make(ratio=0.5)
        out = away(offload, lambda _: Overwrites.apply(x * 3.0))
        offload.reload(0, 0)
        out.backward()
        torch.testing.assert_close(x.grad, 18.0 * x.detach())

    def test_what_is_read_without_a_reload_is_fetched(self):
        x = torch.randn(10, requires_grad=True)
        out = away(make(), lambda _: x.exp().sum())
        out.backward()
        assert torch.equal(x.grad, x.detach().exp())

    def test_what_is_never_read_is_let_go_of(self):
        """Its node's gradient is not asked for."""
        x, y = (torch.randn(10, requires_grad=True) for _ in range(2))
        offload = make()
        out = away(offload, lambda _: x.exp().sum() + y.sin().exp().sum())
        offload.reload(0, 0)
        with LiveBytes() as live:
            (gradient,) = torch.autograd.grad(out, x)
            assert torch.equal(gradient, x.detach().exp())
            del out, gradient
            offload.end_step()
            assert live.now == 0

    def test_a_reload_before_the_way_out_is_over_copies_nothing(self):
        x = torch.randn(10, requires_grad=True)
        offload = make()
        with offload.forward(0, 0, None):
            out = x.exp().sum()
        offload.offload(0, 0)
        with LiveBytes() as live:
            offload.reload(0, 0)
            assert live.now == 0
        out.backward()
        assert torch.equal(x.grad, x.detach().exp())

    def test_memory_of_a_dropped_graph_is_free_at_the_end_of_the_step(self):
        x = torch.randn(10, requires_grad=True)
        offload = make()
        away(offload, lambda _: x.exp().sum())
        offload.end_step()
        assert offload.pool.take(40).bytes.numel() == 40 and offload.pool.num_allocated == 1


class TestInput:
    def test_the_leaf_that_collects_the_gradient_loses_its_memory(self):
        x = torch.randn(4, 5).requires_grad_()
        kept, values = storages(x), x.detach().clone()
        offload = make()
        out = away(offload, lambda inside: (inside * inside).sum(), received=x)
        gc.collect()
        assert kept[0].expired() and x.shape == (4, 5)
        offload.reload(0, 0)
        edge = get_gradient_edge(out)
        torch.autograd.backward(edge, torch.ones(()))
        assert torch.equal(x.grad, 2 * values)


class Layers(nn.Module):
    """What a stage is made of: all layers read one table."""

    def __init__(self, number):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(number))

    def forward(self, x):
        table = torch.linspace(0, 1, 32).exp()
        for layer in self.layers:
            x = x + torch.sin(layer(x) * table)
        return F.gelu(x).sum()


class Chained(Layers):
    """What a layer saves last, its result, the next one saves first."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


class TestByLayer:
    def run(self, policy, count=5, kind=Layers):
        """(offload, peak of live bytes in forward, gradients)."""
        torch.manual_seed(0)
        model = kind(count)
        x = torch.randn(64, 32, requires_grad=True)
        offload = make(model, layers=count, policy=policy, moved=frozenset())
        attach_to_layers(offload, model.layers)
        with LiveBytes() as live, offload.forward(0, 0, None):
            out = model(x)
        offload.begin_backward()
        out.backward()
        offload.end_step()
        return offload, live.peak, [x.grad, *(p.grad for p in model.parameters())]

    def test_memory_is_given_up_during_the_forward(self):
        """A layer saves its input and its product with the table. Three of five layers are away at the end, and more
        layers need no more."""
        _, everything, gradients = self.run(ByRatio(0.0))
        offload, less, same = self.run(ByRatio(1.0))
        layer = 2 * 64 * 32 * 4
        assert all(map(torch.equal, same, gradients))
        assert everything - less >= 2.5 * layer
        assert self.run(ByRatio(1.0), count=9)[1] <= less + 1000
        assert self.run(ChosenLayers({0: range(3)}))[1] <= less + 1000
        assert offload.offloaded_bytes >= 2.5 * layer

    def test_one_layer_more_copies_more_and_saves_nothing(self):
        three, four = self.run(ChosenLayers({0: range(3)})), self.run(ChosenLayers({0: range(4)}))
        assert four[0].offloaded_bytes > three[0].offloaded_bytes
        assert four[1] == pytest.approx(three[1], rel=0.02)
        assert all(map(torch.equal, three[2], four[2]))

    @pytest.mark.parametrize("ratio", [0.3, 0.5, 0.77])
    def test_the_ratio_is_met_over_the_layers_that_move(self, ratio):
        whole = self.run(ByRatio(1.0))[0].offloaded_bytes
        assert self.run(ByRatio(ratio))[0].offloaded_bytes == pytest.approx(
            ratio * whole, abs=300
        )  # the table goes at first

    def test_what_two_layers_save_moves_with_the_later_one(self):
        _, everything, gradients = self.run(ByRatio(0.0), kind=Chained)
        _, less, same = self.run(ByRatio(1.0), kind=Chained)
        assert all(map(torch.equal, same, gradients))
        assert everything - less >= 1.9 * 64 * 32 * 4

    def test_a_layer_that_is_recomputed_in_backward_opens_no_group(self):
        model = Layers(5)
        offload = make(model, layers=5, moved=frozenset())
        attach_to_layers(offload, model.layers)
        model(torch.randn(2, 32)).backward()
        assert offload.saved_bytes == {} and offload.offloaded_bytes == 0


class TestModules:
    FIELDS: ClassVar = {**LLAMA, "num_layers": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}

    def run(self, *parts, evaluate=False, **more):
        """(bytes out, gradients) of a decoder whose first two layers may move."""
        model = make_model({**self.FIELDS, **more}, pool.groups())
        policy, layers = ByModules(parts), list(model.decoder.layers.values())
        offload = make(model, layers=4, policy=policy, moved=frozenset())
        attach_to_layers(offload, layers)
        policy.attach(layers)
        ids = make_ids(2, 16)
        if evaluate:
            model.eval()
            with torch.no_grad():
                losses(model, ids)
            return offload.offloaded_bytes, offload.saved_bytes
        with offload.forward(0, 0, None):
            loss = losses(model, ids).sum()
        loss.backward()
        offload.end_step()
        return offload.offloaded_bytes, [p.grad for p in model.parameters()]

    def test_parts_move_what_they_save(self):
        """s b = 32 tokens of fp32; h 32, 8 + 4 + 4 heads of 4, f 48; two layers move."""
        nothing, expected = self.run()
        assert nothing == 0
        tokens, layers = 32 * 4, 2
        # fc1's input is the norm's output; the activation keeps gate and up and silu's input and output.
        assert self.run("mlp_fc1")[0] == layers * tokens * 32
        # linear_proj's input is the attention's output, which attention saves first where it needs it.
        assert self.run("mlp_fc2")[0] == layers * tokens * 48
        alone = {part: self.run(part)[0] for part in OFFLOAD_MODULES}
        together, gradients = self.run(*OFFLOAD_MODULES)
        assert all(map(torch.equal, gradients, expected))
        assert together <= sum(alone.values()) and all(0 < nbytes < together for nbytes in alone.values())

    def test_norms_behind_attention_move_with_those_before_it(self):
        """Each keeps its input and one number per token."""
        before, both = self.run("attn_norm")[0], self.run("attn_norm", post_norm=True)[0]
        behind, _ = self.run("attn_norm", post_norm=True, pre_norm=False)
        assert both - before == behind == 2 * 32 * 4 * (32 + 1)

    def test_an_evaluation_has_no_hooks(self):
        assert self.run(*OFFLOAD_MODULES, evaluate=True) == (0, {})


def test_the_address_of_an_empty_parameter_may_be_an_activations():
    """A sharded parameter is empty between steps. When it is unsharded, an activation may get its storage's address."""
    model = nn.Linear(3, 3, bias=False)
    model.weight.data = torch.empty(0)
    storage = model.weight.untyped_storage()
    offload = make(model)
    model.weight.data = torch.ones(3, 3)
    storage.resize_(64)
    activation = torch.empty(0).set_(storage, 0, (16,))
    assert activation.untyped_storage()._cdata == storage._cdata and not offload.is_resident(activation)

"""A decoder layer whose sequence is cut: what its attention sends runs beside the rest of the layer."""

import pytest
import torch

from megatron.core.comm.collectives import Handle
from megatron.core.context_parallel.transfer_trace import UNTRACED, Trace
from megatron.core.parameter import initialize, local_parameters
from megatron.core.streams.streams import Streams
from megatron.core.timeline import ROWS, Timeline
from megatron.core.transformer.block import TransformerLayer
from megatron.core.transformer.context import Positions
from megatron.kernels.ops.attention_lse import BlockKernel
from tests import pool
from tests.unit.models.builds import CPU, GPT, make_build

S, B, H = 8, 2, 32  # a rank's


def layer_of(groups, kind, **options):
    build = make_build(GPT, groups, cp_comm_types=(kind,), **options)  # GPT normalises its queries
    layer = TransformerLayer(build, 0)
    initialize(local_parameters(layer), 1)
    return layer


def events(rank, size):
    """(of the forward, of the backward): what is begun, waited for and computed, in order."""
    groups, seen = pool.groups(cp=size), []
    heartbeat = groups.heartbeat
    kernel = make_build(GPT, groups).kernels.block_attention

    def noting(event, call):
        def noted(*args):
            seen.append(event(args) if callable(event) else event)
            return call(*args)

        return noted

    def note(event):
        return lambda *_: seen.append(event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat, "enter", noting(lambda args: f"begin {args[0]}", heartbeat.enter))
        patch.setattr(Handle, "wait", noting(lambda args: f"wait {args[0].op}", Handle.wait))
        blocks = BlockKernel(noting("attend", kernel.forward), noting("attend", kernel.backward))
        layer = layer_of(groups, "all_gather", block_attention=blocks)
        layer.self_attention.q_layernorm.register_forward_pre_hook(note("queries"))
        layer.self_attention.k_layernorm.register_forward_pre_hook(note("keys"))
        layer.mlp.register_forward_pre_hook(note("MLP"))
        # The gradient comes to what these modules gave, and leaves them for what they were given.
        layer.mlp.register_forward_hook(lambda module, x, out: out.register_hook(note("MLP")) and None)
        layer.mlp.register_forward_pre_hook(lambda module, x: x[0].register_hook(note("MLP done")) and None)
        layer.self_attention.q_layernorm.register_forward_pre_hook(
            lambda module, x: x[0].register_hook(note("queries done")) and None
        )
        out = layer(torch.ones(S, B, H, requires_grad=True), Positions((), None))
        forward = seen.copy()
        seen.clear()
        out.backward(torch.ones_like(out))
    return forward, seen


def test_order():
    forward = ["keys", "begin all_gather", "queries", "attend", "wait all_gather", "attend", "MLP"]
    backward = ["begin all_gather", "MLP", "MLP done", "wait all_gather", "attend", "begin reduce_scatter"]
    backward += ["attend", "queries done", "wait reduce_scatter"]
    assert pool.run(2, events) == [(forward, backward)] * 2


def drawn(rank, size, kind):
    """(rows, names) of the spans of a forward and backward; the same gradient without a timeline."""
    groups, timeline = pool.groups(cp=size, inner=2 if kind == "a2a+p2p" else 1), Timeline(CPU)
    gradients = []
    for trace in (Trace(Streams(CPU, timeline)), UNTRACED):
        layer, x = layer_of(groups, kind, cp_trace=trace), torch.ones(S, B, H, requires_grad=True)
        timeline.start()
        layer(x, Positions((), None)).square().sum().backward()
        gradients.append(x.grad)
        if len(gradients) == 1:
            spans = timeline.stop()
    assert all(span.stop >= span.start for span in spans)
    return {span.row for span in spans}, sorted(span.name for span in spans), bool(gradients[0].equal(gradients[1]))


KEYS, GRADIENT = "keys and values", "their gradient"
GATHER = "all-gather of keys and values"


@pytest.mark.parametrize(
    ("kind", "size", "names"),
    [
        ("p2p", 2, [KEYS] * 2 + [GRADIENT]),
        ("all_gather", 2, [GATHER] * 2 + ["reduce-scatter of their gradient"]),
        ("a2a", 2, ["tokens for heads"] * 4),
        ("a2a+p2p", 4, [KEYS] * 2 + [GRADIENT] + ["tokens for heads"] * 4),
    ],
)
def test_timeline(kind, size, names):
    """Every transfer is a span of its own row."""
    assert "cp" in ROWS
    for rows, found, same in pool.run(size, drawn, kind):
        assert rows == {"cp"} and found == sorted(names) and same

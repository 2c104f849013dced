"""Stages of a pipeline that save a known number of bytes and check what they get back; ranks are threads."""

import torch
from torch import nn

from megatron.core.offload.activations import ActivationOffload, attach_to_layers
from megatron.schedule.offload_pass import moved_groups

PIECE, PIECES = 4096, 8  # bytes of a tensor, tensors that a layer saves
LAYER_BYTES = PIECE * PIECES


class Layer(nn.Module):
    """Adds one to x and saves tensors full of a number of its own."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x, microbatch):
        return _Keep.apply(x, 100 * self.number + microbatch)


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value):
        ctx.save_for_backward(*(torch.full((PIECE // 4,), float(value + piece)) for piece in range(PIECES)))
        ctx.value = value
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        # One by one, as the nodes of a layer would: what has been read is let go of.
        for piece, kept in enumerate(ctx.saved_tensors):
            assert kept.min() == kept.max() == float(ctx.value + piece)
        return grad, None


class Stages(nn.Module):
    """The program of a rank: its stages, with `layers` layers each, run as `TrainStep` runs them."""

    def __init__(self, schedule, rank, layers, policy, engine, pool, spend=lambda kind: None):
        super().__init__()
        self.here = schedule.placement.stages_of(rank)
        self.layers = nn.ModuleList(Layer(stage * layers + i) for stage in self.here for i in range(layers))
        self._count, self._last, self._spend = layers, schedule.placement.num_stages - 1, spend
        self.offload = ActivationOffload(
            policy, engine, pool, self, dict.fromkeys(self.here, layers), torch.device("cpu")
        )
        attach_to_layers(self.offload, self.layers)
        self.offload.begin_step(moved_groups(schedule.actions[rank]), ())

    def run_forward(self, stage, microbatch, received):
        x = torch.ones(3, requires_grad=True) if stage == 0 else received
        first = self.here.index(stage) * self._count
        for layer in self.layers[first : first + self._count]:
            x = layer(x, microbatch)
        self._spend("F")
        return x.sum() if stage == self._last else x


class Program:
    """`Program` and `Gradients` of an engine."""

    def __init__(self, stages, spend=lambda kind: None):
        self._stages, self._spend = stages, spend

    def forward(self, stage, microbatch, received):
        with self._stages.offload.forward(stage, microbatch, received) as x:
            return self._stages.run_forward(stage, microbatch, x)

    def shape(self, microbatch):
        return (3,)

    def backward(self, stage, microbatch, run, *, last):
        self._stages.offload.begin_backward()
        run()
        self._spend("B")

    def input_grad(self, stage, microbatch, run):
        self._stages.offload.begin_backward()
        run()
        self._spend("I")

    def weight_grad(self, stage, microbatch, *, last):
        self._stages.offload.begin_backward()
        self._spend("W")

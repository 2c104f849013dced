"""The engine: order, values, and how long a graph lives."""

import weakref

import pytest
import torch

from megatron.core.pipeline_parallel.engine import run
from megatron.core.pipeline_parallel.schedule import forward_only, one_forward_one_backward


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 3), (4, 6), (4, 2)])
def test_values_and_gradients(p, m):
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    x = torch.arange(1.0, 2 * m + 1).view(m, 2)
    outputs = run(one_forward_one_backward(0, p, m), lambda i: (weight * x[i]).square().sum())
    assert [float(out) for out in outputs] == [float((weight.detach() * row).square().sum()) for row in x]
    assert not any(out.requires_grad for out in outputs)
    torch.testing.assert_close(weight.grad, (2 * weight.detach() * x.square()).sum(0))


@pytest.mark.parametrize(("p", "m"), [(1, 5), (3, 5)])
def test_no_more_graphs_alive_than_promised(p, m):
    weight = torch.ones(4, requires_grad=True)
    activations = []

    def forward(i):
        activation = weight * (i + 1)
        out = activation.exp().sum()
        saved = activation.exp()  # kept by the graph of the output alone
        out = out + saved.square().sum()
        activations.append(weakref.ref(saved))
        alive = sum(ref() is not None for ref in activations)
        assert alive <= p, f"{alive} graphs at the forward of microbatch {i}"
        return out

    run(one_forward_one_backward(0, p, m), forward)
    assert len(activations) == m and not any(ref() is not None for ref in activations)


def test_forward_only_in_evaluation():
    with torch.no_grad():
        outputs = run(forward_only(0, 3), lambda i: torch.tensor(float(i)))
    assert [float(out) for out in outputs] == [0.0, 1.0, 2.0]

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
    backward = []

    def differentiate(i, output):
        backward.append(i)
        output.backward()

    outputs = run(one_forward_one_backward(0, p, m), lambda i: (weight * x[i]).square().sum(), differentiate)
    assert backward == list(range(m))
    assert [float(out) for out in outputs] == [float((weight.detach() * row).square().sum()) for row in x]
    assert not any(out.requires_grad for out in outputs)
    torch.testing.assert_close(weight.grad, (2 * weight.detach() * x.square()).sum(0))


@pytest.mark.parametrize(("p", "m"), [(1, 5), (3, 5)])
def test_no_more_graphs_alive_than_promised(p, m):
    weight = torch.ones(4, requires_grad=True)
    kept = []

    def forward(i):
        saved = (weight * (i + 1)).exp()  # kept by the graph of the output alone
        out = saved.square().sum()
        kept.append((weakref.ref(saved), weakref.ref(out)))
        for number, what in enumerate(("graphs", "outputs")):
            alive = sum(refs[number]() is not None for refs in kept)
            assert alive <= p, f"{alive} {what} at the forward of microbatch {i}"
        return out

    run(one_forward_one_backward(0, p, m), forward, lambda i, output: output.backward())
    assert len(kept) == m and all(ref() is None for refs in kept for ref in refs)


def test_forward_only_in_evaluation():
    with torch.no_grad():
        outputs = run(forward_only(0, 3), lambda i: torch.tensor(float(i)))
    assert [float(out) for out in outputs] == [0.0, 1.0, 2.0]

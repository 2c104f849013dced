"""When layers run by graphs, and what these read; the graphs are tests/fake_graph.py, which fills their memory with
NaN."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F

from megatron.core.streams import graph as graph_module
from megatron.core.streams.graph import CudaGraphs
from megatron.core.transformer.context import Positions
from megatron.core.transformer.layer_graphs import LayerGraphs
from tests import pool
from tests.fake_graph import FakePool, NotRepeatable
from tests.unit.models.builds import CPU, GPT, LLAMA, gradients, losses, make_data_parallel, make_ids, make_model

WARMUP = 1


class Setup:
    """A model with its graphs, ready for the first step."""

    def __init__(self, fields=LLAMA, *, make_pool=None, device=CPU):
        """make_pool: by default stand-ins, whose only pool is `pool`."""
        self.pool = FakePool()
        weights = make_model(fields, pool.groups(), spread=0.1).state_dict()
        self.model = make_model(fields, pool.groups(), device=device)
        self.model.load_state_dict(weights)
        self.data_parallel = make_data_parallel(self.model, pool.groups())
        layers = {int(number): layer for number, layer in self.model.decoder.layers.items()}
        self.layers = range(len(layers))
        self.graphs = LayerGraphs(layers, self.data_parallel, make_pool or (lambda: self.pool), warmup_steps=WARMUP)
        self.model.decoder.graphs = self.graphs

    def step(self, *batches, spoil=False):
        """(losses, gradients) of one step; spoil: what the forward was given is gone before the backward."""
        self.data_parallel.begin_step(len(batches))
        self.graphs.begin_step({self.layers: 1})
        found = []
        for number, ids in enumerate(batches, start=1):
            with spoiled(self.graphs) if spoil else contextlib.nullcontext():
                loss = losses(self.model, ids).sum()
            self.data_parallel.begin_backward(last=number == len(batches))
            loss.backward()
            self.data_parallel.end_backward(last=number == len(batches))
            found.append(loss.detach().clone())
        self.data_parallel.finish_reduction()
        return found, gradients(self.data_parallel)

    @property
    def replays(self):
        return len(self.pool.log)


@contextlib.contextmanager
def spoiled(graphs):
    """The tensors that `graphs` gets are overwritten when its forward is over."""
    run = graphs.run

    def spoiling(x, positions, layers):
        out = run(x, positions, layers)
        if out is not None:
            for tensor in (x, *itertools.chain(*positions.rotary)):
                tensor.data.fill_(float("nan"))
        return out

    graphs.run = spoiling
    yield
    del graphs.run


@pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["llama", "gpt"])
def test_nothing_but_static_tensors_is_read(fields):
    """Gradients of several microbatches, accumulated and from zero again, on inputs that were overwritten."""
    plain, graphed = Setup(fields), Setup(fields)
    plain.model.decoder.graphs = None
    for seed in (0, 1, 2):
        batches = [make_ids(2, 16, seed=10 * seed + number) for number in range(2)]
        one, other = plain.step(*batches), graphed.step(*batches, spoil=True)
        assert all(a.equal(b) for a, b in zip(one[0], other[0], strict=True))
        for name, gradient in one[1].items():
            assert gradient.equal(other[1][name]), f"{name} in step {seed}"
    assert graphed.replays == 2 * 2 * 2 * len(graphed.layers), "two steps of two microbatches, forward and backward"


def test_a_layer_waits_for_its_parameters():
    """Before the graph that reads them; the layers behind it may still be on their way."""
    setup, ids = Setup(), make_ids(2, 16)
    setup.step(ids)
    setup.data_parallel.before_read = lambda parameters: setup.pool.log.append(("read", list(parameters)))
    setup.step(ids)
    read = [list(layer.parameters()) for layer in setup.model.decoder.layers.values()]
    found = setup.pool.log[: 2 * len(read)]
    assert [what for what, _ in found] == ["read", "replay"] * len(read)
    for (_, parameters), expected in zip(found[::2], read, strict=True):
        assert {id(each) for each in parameters} == {id(each) for each in expected} != set()


def test_results_are_copies():
    """The slot serves the next microbatch while the output and the gradient of one are still being sent."""
    setup = Setup()
    setup.step(make_ids(2, 16))
    setup.data_parallel.begin_step(2)
    setup.graphs.begin_step({setup.layers: 1})
    shape = setup.graphs._inputs[setup.layers][0].shape
    tables = Positions(setup.model._tables(torch.arange(16).unsqueeze(0), 16), None)
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(2)]
    found = []
    for x in inputs:
        out = setup.graphs.run(x, tables, setup.layers)
        setup.data_parallel.begin_backward(last=x is inputs[-1])
        (grad,) = torch.autograd.grad(out.sum(), x)
        setup.data_parallel.end_backward(last=x is inputs[-1])
        found.append((out, grad, out.detach().clone(), grad.clone()))
    for out, grad, was_out, was_grad in found:
        assert out.equal(was_out) and grad.equal(was_grad)
    assert not found[0][0].equal(found[1][0]) and not found[0][1].equal(found[1][1])


def test_without_graphs():
    """In the first step, in evaluation, and for other shapes."""
    setup, ids = Setup(), make_ids(2, 16)
    setup.step(ids)
    assert setup.replays == 0 and not setup.pool.graphs
    setup.step(ids)
    assert setup.replays == len(setup.pool.graphs) == 2 * len(setup.layers)
    with torch.no_grad():
        losses(setup.model, ids)
    setup.model.eval()
    losses(setup.model, ids)
    setup.model.train()
    setup.step(make_ids(2, 12))
    setup.step(make_ids(1, 16))
    assert setup.replays == 2 * len(setup.layers)
    setup.step(ids)
    assert setup.replays == 4 * len(setup.layers) and len(setup.pool.graphs) == 2 * len(setup.layers)


def test_more_microbatches_than_slots_run_without():
    setup, ids = Setup(), make_ids(2, 16)
    setup.step(ids)
    setup.data_parallel.begin_step(2)
    setup.graphs.begin_step({setup.layers: 1})
    first, second = (losses(setup.model, ids).sum() for _ in range(2))
    assert setup.replays == len(setup.layers)
    assert first.equal(second)


def test_the_stand_in_refuses_what_cannot_be_repeated():
    x = torch.ones(4)
    for function, why in (
        (lambda: float(x.sum()), "the host reads a value"),
        (lambda: F.dropout(x, 0.5), "bernoulli_.float would draw the same numbers"),
        (lambda: x.masked_select(x > 0), "the host reads a value of the device: masked_select"),
    ):
        with pytest.raises(NotRepeatable, match=why):
            FakePool().graph().capture(function)


def test_the_stand_in_repeats_on_the_same_tensors():
    x, total = torch.ones(4), torch.zeros(4)
    graph = FakePool().graph()
    doubled = graph.capture(lambda: total.add_(x * 2).sum())
    assert total.equal(torch.zeros(4)), "nothing has run"
    x.fill_(3.0)
    graph.replay()
    graph.replay()
    assert total.equal(torch.full((4,), 12.0)) and doubled == 48


class CudaStandIn:
    """Notes what is asked of torch.cuda."""

    def __init__(self, calls):
        self.calls = calls

    def Stream(self, device):
        return f"stream of {device}"

    def graph_pool_handle(self):
        self.calls.append("pool")
        return f"pool {self.calls.count('pool')}"

    def CUDAGraph(self):
        return self

    def replay(self):
        self.calls.append("replay")

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.calls.append((pool, stream, capture_error_mode))
        yield


def test_cuda_graphs_share_pool_and_stream(monkeypatch):
    calls = []
    monkeypatch.setattr(graph_module.torch, "cuda", CudaStandIn(calls))
    graphs = CudaGraphs("cuda:1")
    for number in (1, 2):
        shared = graphs.pool()
        for _ in range(2):
            graph = shared.graph()
            assert graph.capture(lambda: 5) == 5
            assert calls[-1] == (f"pool {number}", "stream of cuda:1", "thread_local")
    graph.replay()
    assert calls[-1] == "replay"

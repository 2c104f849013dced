"""Head and loss of some tokens at a time: the losses, the gradients and the memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.parameter import local_parameters
from megatron.core.tensor_parallel.chunked_loss import chunked_loss, loss_in_backward
from megatron.core.tensor_parallel.token_chunks import TokenChunks
from tests import pool
from tests.unit.models.builds import GEMMA2, GPT, LLAMA, VOCAB, make_data_parallel, make_ids, make_model

B, S = 2, 12
TOKENS = B * S
HIDDEN, WIDTHS = LLAMA["hidden_size"], (VOCAB, 112)  # of logits, without the padded words and with them
MODELS = {
    "untied": LLAMA,
    "tied": GPT,
    "tied, output bias": {**GPT, "add_output_layer_bias": True},
    "softcap": GEMMA2,
    "scaled": {**LLAMA, "logits_scaling": 8.0},
    "bf16": {**LLAMA, "bf16": True},
}


def assert_same_gradients(gradients, expected):
    """Up to the order of sums. A gradient that is zero but for rounding is compared with those of the whole model."""
    assert set(gradients) == set(expected)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        error = float((gradients[name] - gradient).abs().max())
        assert error <= 1e-6 * max(float(gradient.abs().max()), 0.1 * largest), name


class LargestLogits(TorchDispatchMode):
    """Rows of the largest tensor with a column per word."""

    rows = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.ndim and x.shape[-1] in WIDTHS:
                rows = x.numel() // x.shape[-1]
                if rows != HIDDEN:  # the transposed weight
                    self.rows = max(self.rows, rows)
        return out


def step(fields, chunk, *, in_backward=True, frozen=(), split=False, **options):
    """Losses before backward and after it, and all gradients, of weighted losses."""
    groups = pool.groups()
    model = make_model(fields, groups, loss_chunk=chunk, **options)
    for name, parameter in local_parameters(model).items():
        parameter.requires_grad_(not any(part in name for part in frozen))
    data_parallel = make_data_parallel(model, groups)
    ids = make_ids(B, S)
    positions = torch.arange(S).unsqueeze(0)
    data_parallel.begin_step(1)
    losses = model(ids[:, :-1], positions, labels=ids[:, 1:], loss_in_backward=in_backward)
    before = losses.detach().clone()
    weights = torch.rand(B, S, generator=torch.Generator().manual_seed(5))
    if split:
        with data_parallel.deferred_weight_grads() as jobs:
            (losses * weights).sum().backward()
        data_parallel.begin_backward(last=True)
        for job in jobs:
            job()
    else:
        data_parallel.begin_backward(last=True)
        (losses * weights).sum().backward()
    data_parallel.end_backward(last=True)
    data_parallel.finish_reduction()
    grads = {n: p.slot.main_grad.clone() for bucket in data_parallel.buckets for n, p in bucket.parameters.items()}
    assert data_parallel.without_gradient() == []
    return before, losses.detach().clone(), grads


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("model", MODELS)
def test_one_chunk_gives_the_bits_of_whole_logits(model, z_loss):
    before, losses, gradients = step(MODELS[model], TOKENS, in_backward=False, z_loss=z_loss)
    late_before, late_losses, late_gradients = step(MODELS[model], TOKENS, z_loss=z_loss)
    assert before.equal(losses) and late_before.isnan().all()
    assert late_losses.equal(losses)
    assert all(late_gradients[name].equal(gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("chunk", [1, 2, 10, TOKENS - 2])
@pytest.mark.parametrize("model", sorted(set(MODELS) - {"bf16"}))
def test_chunks_give_the_numbers_of_whole_logits(model, chunk):
    _, losses, gradients = step(MODELS[model], TOKENS, in_backward=False, z_loss=0.1)
    _, late_losses, late_gradients = step(MODELS[model], chunk, z_loss=0.1)
    torch.testing.assert_close(late_losses, losses, rtol=1e-6, atol=1e-6)
    assert_same_gradients(late_gradients, gradients)


@pytest.mark.parametrize("frozen", [("decoder", "embedding"), ("output_layer",)])
def test_frozen_parts(frozen):
    _, losses, gradients = step(LLAMA, TOKENS, in_backward=False, frozen=frozen)
    _, late_losses, late_gradients = step(LLAMA, 10, frozen=frozen)
    torch.testing.assert_close(late_losses, losses, rtol=1e-6, atol=1e-6)
    assert_same_gradients(late_gradients, gradients)


@pytest.mark.parametrize("chunk", [10, TOKENS])
@pytest.mark.parametrize("model", ["untied", "tied", "tied, output bias"])
def test_the_head_of_a_split_backward(model, chunk):
    """With several chunks the head's weight gradient is written with the gradient of the input; the jobs hold no
    operand as large as the logits."""
    _, losses, gradients = step(MODELS[model], TOKENS, in_backward=False)
    _, late_losses, late_gradients = step(MODELS[model], chunk, split=True)
    torch.testing.assert_close(late_losses, losses, rtol=1e-6, atol=1e-6)
    assert_same_gradients(late_gradients, gradients)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 7, 8, 100])
def test_chunks_are_those_of_a_gather(shards, tokens):
    """What all shards of a chunk hold, one after the other, are its targets; each token is in one chunk."""
    s, b = 16, 2
    everything = torch.arange(s * b).view(s, b)
    chunks, back = TokenChunks.of(tokens, b, shards), torch.full((s, b), -1)
    of_shards = everything.chunk(shards)
    parts = chunks.slices(of_shards[0])
    for part in parts:
        gathered = torch.cat([shard[part] for shard in of_shards])
        assert gathered.equal(chunks.tokens(everything, part))
        assert gathered.numel() <= max(tokens, b * shards)
        chunks.write(back, part, gathered)
    assert back.equal(everything)
    assert len(parts) == -(-s // (chunks.length * shards))


def test_losses_of_chunks_without_gradients_are_those_of_their_tokens():
    hidden, targets = torch.randn(8, 2, 3), torch.arange(32).view(16, 2)
    chunks = TokenChunks(3, 2)

    def of_chunk(x, targets):
        assert x.shape[0] <= 3 and targets.shape[0] == 2 * x.shape[0]
        return targets.float()

    with torch.no_grad():
        assert chunked_loss(of_chunk, hidden, targets, chunks).equal(targets.float())
        assert loss_in_backward(of_chunk, [], hidden.requires_grad_(), targets, chunks).equal(targets.float())
    assert loss_in_backward(of_chunk, [], hidden.detach(), targets, chunks).equal(targets.float())


@pytest.mark.parametrize("split", [False, True])
def test_no_tensor_has_the_logits_of_more_than_a_chunk(split):
    """In forward, in backward and in what is put off."""
    with LargestLogits() as largest:
        step(LLAMA, 6, split=split)
    assert largest.rows == 6
    with LargestLogits() as largest:
        step(LLAMA, 6, in_backward=False)
    assert largest.rows == TOKENS

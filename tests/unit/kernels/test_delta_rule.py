"""The gated delta rule: against a loop over tokens and transformers, in chunks, documents and steps."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from megatron.kernels.ops.attention_segments import segments_of, starts_of
from megatron.kernels.ops.delta_rule import delta_rule
from tests.unit.kernels.close import outputs_and_gradients, random

K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 16, 24


def arguments(s, *, b=2, channels=False, heads=(K_HEADS, V_HEADS), decay=1.0):
    """q, k, v, decay, beta and a state, of a sequence of s tokens."""
    k_heads, v_heads = heads
    q, k = (F.normalize(random(s, b, k_heads, K_DIM, seed=seed), dim=-1) for seed in (1, 2))
    logs = -F.softplus(random(s, b, v_heads, *([K_DIM] if channels else []), seed=3)) * decay
    beta = random(s, b, v_heads, seed=4).sigmoid()
    return [
        q * K_DIM**-0.5,
        k,
        random(s, b, v_heads, V_DIM, seed=5),
        logs,
        beta,
        random(b, v_heads, K_DIM, V_DIM, seed=6),
    ]


def by_token(q, k, v, decay, beta, state, starts=None):
    """The rule as its formula says, one token after the other."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    out = []
    for t in range(len(v)):
        factor = decay[t].exp().reshape(*v.shape[1:3], -1, 1)
        if starts is not None:
            factor = factor.masked_fill(starts[:, t].reshape(-1, 1, 1, 1), 0)
        state = factor * state
        error = v[t] - torch.einsum("bnkv,bnk->bnv", state, k[t])
        state = state + torch.einsum("bn,bnk,bnv->bnkv", beta[t], k[t], error)
        out.append(torch.einsum("bnkv,bnk->bnv", state, q[t]))
    return torch.stack(out), state


def flat(function):
    """`function` with its output and its state in one tensor, so that both have a gradient."""
    return lambda *args: torch.cat([x.flatten() for x in function(*args)])


def assert_rule(function, reference, inputs, tolerance=1e-5):
    """Values and gradients of `function` are those of `reference` in fp64, relative to the largest of each."""
    upstream = random(*flat(reference)(*inputs).shape, seed=9)
    found = outputs_and_gradients(flat(function), inputs, upstream)
    expected = outputs_and_gradients(flat(reference), [x.double() for x in inputs], upstream)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a - b).abs().max() <= tolerance * b.abs().max(), number


def rule(q, k, v, decay, beta, state=None, **options):
    """`delta_rule` with a state as its sixth argument."""
    return delta_rule(q, k, v, decay, beta, state=state, **options)


@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize(("tokens", "size"), [(150, 64), (128, 16), (131, 128), (7, 64), (1, 64)])
def test_is_the_rule(tokens, size, channels):
    assert_rule(lambda *args: rule(*args, chunk_size=size), by_token, arguments(tokens, channels=channels))


@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
def test_strong_decay(channels):
    """Hundreds of nats within a chunk: exp(-G) alone would be infinite. The last bit of a sum of 1000 nats is 6e-5."""
    inputs = arguments(64, channels=channels, decay=30.0)
    assert inputs[3].cumsum(0).min() < -800
    assert_rule(rule, by_token, inputs, tolerance=1e-4)


@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
def test_documents(channels):
    """Each document gets the outputs and gradients that it has alone, and the state is that of the last one."""
    lengths = [[1, 63, 2, 34], [70, 30]]
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(x)), torch.tensor(x)) for x in lengths])
    starts = starts_of(segments_of(ids, torch.device("cpu")))
    assert starts.sum().item() == 6
    *inputs, _ = arguments(100, channels=channels)
    for size in (16, 64):
        assert_rule(
            lambda *args, size=size: rule(*args, chunk_size=size, starts=starts),
            lambda *args: each_alone(args, lengths),
            inputs,
        )
    with_state = arguments(100, channels=channels)
    starts[:, 0] = torch.tensor([True, False])  # the second sample goes on with a document
    assert_rule(lambda *args: rule(*args, starts=starts), lambda *args: by_token(*args, starts), with_state)


def each_alone(inputs, lengths):
    """Outputs and last states of documents that are computed by themselves."""
    outs, states = [], []
    for sample, parts in enumerate(lengths):
        documents = zip(*(x[:, sample : sample + 1].split(parts) for x in inputs), strict=True)
        alone = [by_token(*document, document[0].new_zeros(1, V_HEADS, K_DIM, V_DIM)) for document in documents]
        outs.append(torch.cat([out for out, _ in alone]))
        states.append(alone[-1][1])
    return torch.cat(outs, 1), torch.cat(states)


def test_one_token_that_starts_a_document():
    starts = torch.tensor([[True], [False]])
    inputs = arguments(1)
    assert_rule(lambda *args: rule(*args, starts=starts), lambda *args: by_token(*args, starts), inputs)


def test_steps_continue_a_prompt():
    """A prompt in one call and then a token at a time is the whole sequence."""
    inputs = arguments(75, channels=True)[:5]
    expected, expected_state = delta_rule(*inputs)
    out, state = delta_rule(*(x[:66] for x in inputs))
    outs = [out]
    for t in range(66, 75):
        out, state = delta_rule(*(x[t : t + 1] for x in inputs), state=state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, expected_state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_is_that_of_qwen3_next(name):
    """transformers scales the queries itself."""
    peer = getattr(qwen, name)

    def theirs(q, k, v, decay, beta, state):
        tokens = (x.transpose(0, 1) for x in (q * K_DIM**0.5, k, v, decay, beta))
        out, last = peer(*tokens, initial_state=state, output_final_state=True)
        return out.transpose(0, 1), last

    compare_in_single(rule, theirs, arguments(100))


def test_is_that_of_kimi_linear():
    def theirs(q, k, v, decay, beta, state):
        tokens = (x.transpose(0, 1) for x in (q * K_DIM**0.5, k, v, decay, beta))
        out, last = kimi.recurrent_kimi_delta_attention(*tokens, initial_state=state, output_final_state=True)
        return out.transpose(0, 1), last

    compare_in_single(rule, theirs, arguments(40, channels=True, heads=(4, 4)))


def compare_in_single(function, reference, inputs):
    """Values and gradients of two functions in fp32; the reference computes in no other precision."""
    upstream = random(*flat(reference)(*inputs).shape, seed=9)
    found = outputs_and_gradients(flat(function), inputs, upstream)
    expected = outputs_and_gradients(flat(reference), inputs, upstream)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_half_precision_rounds_inputs_and_outputs_only():
    inputs = [x.bfloat16() if n in (0, 1, 2, 4) else x for n, x in enumerate(arguments(70))]
    out, state = rule(*inputs)
    expected, expected_state = rule(*(x.float() for x in inputs))
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert out.equal(expected.bfloat16())
    assert state.equal(expected_state)


def test_keeps_its_arguments_only():
    """Autograd saves no tensor but those of the caller."""
    inputs = [x.requires_grad_() for x in arguments(130)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        _, state = rule(*inputs)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in inputs}
    assert state.untyped_storage().nbytes() == state.nbytes, "the state holds no states of chunks"


def test_gradient_of_the_state_alone():
    inputs = [x.requires_grad_() for x in arguments(70)]
    _, state = rule(*inputs)
    grads = torch.autograd.grad(state.square().sum(), inputs, allow_unused=True)
    expected = torch.autograd.grad(by_token(*inputs)[1].square().sum(), inputs, allow_unused=True)
    for a, b in zip(grads[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))

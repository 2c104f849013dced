"""State in less than fp32: exact masters, unbiased moments, checkpoints that are fp32."""

import pytest
import torch

from megatron.config.optimizer_offload import STATES, UPDATE, OffloadSettings
from megatron.core.optimizer.precision import join, split
from megatron.kernels.ops.random_rounding import round_at_random
from tests import pool
from tests.parallel.strategies import make_run
from tests.unit.models.builds import CPU, LLAMA, make_data_parallel, make_model

BF16 = {**LLAMA, "num_layers": 1, "bf16": True}
ALLOWED = {"use_precision_aware_optimizer": True}
CHUNK = 1280


def all_bits():
    """fp32 numbers with every lower half over many upper halves, ties and the ends of the range among them."""
    upper = torch.tensor([0, 1, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x0001, 0x7F80], dtype=torch.int64)
    upper = torch.cat([upper, upper + 0x8000])
    bits = (upper[:, None] << 16) + torch.arange(1 << 16)
    return (bits - ((bits >> 31) << 32)).to(torch.int32).flatten().view(torch.float32)


def test_a_weight_and_its_remainder_are_the_master():
    """All of them, bit by bit, but NaNs, whose payload rounding changes: those stay NaNs."""
    master = all_bits()
    weights = master.bfloat16()
    remainder, ties = torch.empty(len(master), dtype=torch.int16), torch.empty(len(master) // 8, dtype=torch.uint8)
    split(master, remainder, ties)
    found = join(weights, remainder, ties, torch.empty_like(master))
    numbers = ~master.isnan()
    assert numbers.sum() > 900_000 and int(ties.count_nonzero()) > 0
    assert found.view(torch.int32)[numbers].equal(master.view(torch.int32)[numbers])
    assert found[~numbers].isnan().all()


def test_rounding_at_random_is_right_on_average():
    """And never farther than the next number; what bf16 can hold stays as it is."""
    values = torch.rand(64, generator=torch.Generator().manual_seed(1)) + 1.0
    bits = torch.randint(-(2**31), 2**31 - 1, (4096, 64), dtype=torch.int32)
    rounded = torch.empty(4096, 64, dtype=torch.bfloat16)
    round_at_random(values.expand(4096, 64).contiguous(), bits, rounded)
    step = 2.0**-7
    assert (rounded.float() - values).abs().max() < step
    # The standard deviation of a mean of 4096 is at most step / 128.
    assert (rounded.float().mean(dim=0) - values).abs().max() < 5 * step / 128
    held = torch.tensor([0.0, 1.0, 1.5, 2.0**-126, float("inf")])
    out = torch.empty(5, dtype=torch.bfloat16)
    round_at_random(held, torch.full((5,), -1, dtype=torch.int32), out)
    assert out.float().equal(held)


def bits_of(groups, name, bucket_size, fields=LLAMA, step=3):
    """Random bits of a whole parameter, or of this tp rank's part."""
    data_parallel = make_data_parallel(make_model(fields, groups), groups, bucket_size=bucket_size)
    (bucket,) = (bucket for bucket in data_parallel.buckets if name in bucket.parameters)
    pieces = [piece for piece in bucket.pieces if piece.name == name]
    found = bucket.random_bits(str(step), CPU, pieces[0].at, pieces[-1].at + pieces[-1].stop - pieces[-1].start)
    return found.view(bucket.parameters[name].info.shape)


QKV, PROJ = "decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.1.mlp.linear_fc2.weight"


SHARED = {**LLAMA, "num_query_groups": 1}


def parts(rank, size):
    groups = pool.groups(tp=2)
    return [bits_of(groups, name, 500).numpy() for name in (QKV, PROJ)], bits_of(groups, QKV, 500, SHARED).numpy()


def test_random_bits_do_not_depend_on_the_layout():
    """Whole and in parts over tp, along either dim; another step draws others."""
    ranks, shared = zip(*pool.run(2, parts), strict=True)
    whole = bits_of(pool.groups(), QKV, 10**6, SHARED)
    for place, found in enumerate(shared):  # its half of 32 rows of queries, and all 8 of the one key and value
        assert whole[:, [*range(16 * place, 16 * place + 16), *range(32, 40)]].equal(torch.from_numpy(found))
    for number, (name, dim) in enumerate([(QKV, 0), (PROJ, 1)]):
        whole = bits_of(pool.groups(), name, 10**6)
        assert torch.cat([torch.from_numpy(rank[number]) for rank in ranks], dim=dim).equal(whole)
        assert not bits_of(pool.groups(), name, 10**6, step=4).equal(whole)
        ones = torch.stack([(whole >> bit) & 1 for bit in range(16)]).float().flatten(1).mean(dim=1)
        assert (ones - 0.5).abs().max() < 0.1, "every one of the 16 bits is as often 0 as 1"


def run_of(mode=None, **optimizer):
    return make_run({}, fields=BF16, offload=mode or OffloadSettings(chunk_size=CHUNK), **optimizer)


def parameters_after(run, steps=20):
    losses, _ = run.steps(steps)
    run.data_parallel.synchronize()
    return losses, torch.cat([p.detach().flatten() for p in run.model.parameters()])


@pytest.mark.parametrize(
    "mode", [None, OffloadSettings(mode=STATES, fraction=1.0, chunk_size=CHUNK)], ids=["near", "states"]
)
def test_remainders_train_as_fp32_masters_do(mode):
    losses, expected = parameters_after(run_of())
    run = run_of(mode, main_params_dtype="bf16", **ALLOWED)
    found_losses, found = parameters_after(run)
    assert found_losses == losses and found.equal(expected)
    assert {"remainder", "ties"} <= set(run.optimizer.chunks[0][0].state)
    assert run.optimizer.params_norm() > 0


LOW = {**ALLOWED, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


def test_moments_in_bf16_do_not_depend_on_where_they_are():
    """Near, in chunks, updated by the CPU, parked; and the run learns as the one in fp32 does."""
    losses, expected = parameters_after(run_of(**LOW))
    for mode in (
        OffloadSettings(chunk_size=4096),
        OffloadSettings(mode=UPDATE, fraction=0.6, overlap=True, chunk_size=CHUNK),
        OffloadSettings(mode=STATES, fraction=1.0, chunk_size=CHUNK),
    ):
        run = run_of(mode, **LOW)
        found = parameters_after(run)
        assert found[0] == losses and found[1].equal(expected)
        for chunks in run.optimizer.chunks:
            for chunk in chunks:
                assert chunk.state["exp_avg"].dtype == chunk.state["exp_avg_sq"].dtype == torch.bfloat16
    exact, _ = parameters_after(run_of())
    assert losses != exact and losses == pytest.approx(exact, rel=2e-3)


def test_small_squares_decay_only_when_rounded_at_random():
    """What nearest rounding does wrong: a thousandth less is the same number again."""
    v = torch.full((64 * 64,), 1.0, dtype=torch.bfloat16)
    nearest = v.clone()
    for step in range(500):
        bits = torch.randint(0, 1 << 16, v.shape, generator=torch.Generator().manual_seed(step), dtype=torch.int32)
        round_at_random(v.float() * 0.999, bits, v)
        nearest = (nearest.float() * 0.999).bfloat16()
    assert float(v.float().mean()) == pytest.approx(0.999**500, rel=0.01)
    assert nearest.eq(nearest[0]).all() and float(nearest[0]) > 0.99


def test_pieces_are_fp32_and_go_back_exactly():
    source = run_of(main_params_dtype="bf16", **LOW)
    source.steps(3)
    saved = [(piece, key, tensor.clone()) for piece, key, tensor in source.optimizer.pieces()]
    assert all(tensor.dtype == torch.float32 for _, _, tensor in saved)
    assert {key for _, key, _ in saved} == {"exp_avg", "exp_avg_sq", "master"}
    target = run_of(main_params_dtype="bf16", **LOW)
    pieces = list(target.optimizer.pieces())
    for (_, _, to), (_, _, tensor) in zip(pieces, saved, strict=True):
        to.copy_(tensor)
    target.optimizer.load(pieces)
    target.optimizer.steps = 3
    assert parameters_after(target, 3)[1].equal(parameters_after(source, 3)[1])
    for (piece, key, ours), (_, _, theirs) in zip(target.optimizer.pieces(), source.optimizer.pieces(), strict=True):
        assert ours.equal(theirs), (piece.name, key)


def test_masters_from_parameters():
    run = run_of(main_params_dtype="bf16", **ALLOWED)
    run.steps(2)
    run.optimizer.masters_from_parameters()
    for piece, key, tensor in run.optimizer.pieces():
        if key == "master":
            assert tensor.bfloat16().float().equal(tensor), piece.name
    assert run.data_parallel.device == CPU

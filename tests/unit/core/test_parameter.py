"""Parameters that know their place, and initial values that no layout changes."""

import math

import pytest
import torch
from torch import nn

from megatron.core import parameter as module
from megatron.core.parameter import GradSlot, initialize, local_parameters, make_parameter
from megatron.spec.parameter import HEADS, SEQUENCE, Init, ParamSpec, Section, Shard
from tests.unit.models.builds import slot_of
from tests.unit.silent_groups import silent_groups

CPU = torch.device("cpu")
NORMAL = Init("normal", 0.02)


def make(shape, dim=None, size=1, rank=0, init=NORMAL, dtype=torch.float32, **fields):
    shards = () if dim is None else (Shard("tp", dim),)
    spec = ParamSpec(shape, init, shards, **fields)
    return make_parameter(spec, silent_groups(size, rank, tp=size), dtype=dtype, device=CPU)


def filled(shape, name="a.weight", seed=1, **options):
    parameter = make(shape, **options)
    initialize({name: parameter}, seed)
    return parameter.detach()


class TestPlace:
    @pytest.mark.parametrize(("size", "dim"), [(2, 0), (4, 1), (4, 2)])
    def test_sharded(self, size, dim):
        shape = (8, 12, 16)
        for rank in range(size):
            parameter = make(shape, dim, size, rank)
            expected = list(shape)
            expected[dim] //= size
            assert tuple(parameter.shape) == tuple(expected)
            offset = tuple(rank * expected[dim] if d == dim else 0 for d in range(3))
            assert parameter.info.spec.shape == shape
            assert parameter.info.sections == (Section(0, offset, tuple(expected), holders=1, partial=False),)
            assert parameter.info.numel == 8 * 12 * 16 and parameter.slot is None

    def test_with_one_rank_nothing_is_sharded(self):
        for dim in (0, None):
            info = make((8, 4), dim, input_sharding=HEADS).info
            assert info.sections == (Section(0, (0, 0), (8, 4), holders=1, partial=False),) and info.spec.decay

    def test_flags(self):
        info = make((8,), None, 2, 1, input_sharding=HEADS, decay=False).info
        assert info.sections == (Section(0, (0,), (8,), holders=2, partial=True),) and not info.spec.decay

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_gradients_are_partial_where_the_input_is_sharded(self, sequence_parallel):
        for sharding, expected in ((None, False), (SEQUENCE, sequence_parallel), (HEADS, True)):
            spec = ParamSpec((8,), NORMAL, input_sharding=sharding)
            made = make_parameter(
                spec,
                silent_groups(2, 0, tp=2),
                sequence_parallel=sequence_parallel,
                dtype=torch.float32,
                device=CPU,
            )
            assert [section.partial for section in made.info.sections] == [expected]

    def test_neighbours_that_share_a_group(self):
        """Two groups of 12 rows, on four ranks: 8 divided between two of them each, 4 that both hold."""
        found = [make((2, 12, 5), 0, 4, rank, own_rows=8).info for rank in range(4)]
        for rank, info in enumerate(found):
            group, place = divmod(rank, 2)
            own = Section(0, (group, 4 * place, 0), (1, 4, 5), holders=1, partial=False)
            shared = Section(20, (group, 8, 0), (1, 4, 5), holders=2, partial=True)
            assert info.shape == (1, 8, 5) and info.sections == (own, shared)
            assert [info.section_at(index) for index in (0, 19, 20, 39)] == [own, own, shared, shared]
        assert make((2, 12), 0, 4, 3, own_rows=0).info.sections == (Section(0, (1, 0), (1, 12), 2, True),)
        assert make((2, 12), 0, 4, 3, own_rows=12).info.sections == (Section(0, (1, 6), (1, 6), 1, False),)
        assert make((4, 12), 0, 4, 3, own_rows=8).info.sections == make((4, 12), 0, 4, 3).info.sections, "a group each"


class TestLocalParameters:
    def test_tied_once_under_the_first_name(self):
        model = nn.Module()
        model.first, model.second = nn.Module(), nn.Module()
        model.first.weight = make((4, 4))
        model.second.weight = model.first.weight
        model.second.bias = make((4,))
        assert list(local_parameters(model)) == ["first.weight", "second.bias"]

    def test_a_plain_parameter_is_a_bug(self):
        with pytest.raises(AssertionError, match="weight was not made by make_parameter"):
            local_parameters(nn.Linear(2, 2))


class TestInitialValues:
    @pytest.mark.parametrize("dim", [0, 1, 2])
    @pytest.mark.parametrize("size", [2, 4, 8])
    @pytest.mark.parametrize("kind", ["normal", "uniform"])
    def test_a_shard_is_a_slice_of_the_whole(self, dim, size, kind):
        shape, init = (8, 16, 24), Init(kind, 0.5)
        whole = filled(shape, init=init)
        shards = [filled(shape, init=init, dim=dim, size=size, rank=rank) for rank in range(size)]
        assert torch.cat(shards, dim).equal(whole)

    def test_neighbours_that_share_a_group(self):
        whole = filled((2, 12, 5))
        for rank in range(4):
            (group, place), found = divmod(rank, 2), filled((2, 12, 5), dim=0, size=4, rank=rank, own_rows=8)
            assert found[:, :4].equal(whole[group : group + 1, 4 * place : 4 * place + 4])
            assert found[:, 4:].equal(whole[group : group + 1, 8:])

    def test_a_vector(self):
        whole = filled((64,))
        assert torch.cat([filled((64,), dim=0, size=4, rank=rank) for rank in range(4)]).equal(whole)

    def test_blocks_of_rows_do_not_show(self, monkeypatch):
        whole = filled((37, 50))
        for block in (1, 120, 1 << 20):
            monkeypatch.setitem(module._BLOCK, "cpu", block)
            assert filled((37, 50)).equal(whole)

    def test_depends_on_seed_and_name_alone(self):
        whole = filled((64, 64))
        torch.manual_seed(123)
        assert filled((64, 64)).equal(whole)
        assert not filled((64, 64), seed=2).equal(whole)
        assert not filled((64, 64), name="b.weight").equal(whole)

    def test_known_values(self):
        """A change of the generator would start every run from another model: checkpoints and curves would not
        compare."""
        torch.testing.assert_close(
            filled((2, 3), name="decoder.layers.0.mlp.linear_fc1.weight", seed=1234, init=Init("uniform", 1.0)),
            torch.tensor(slow_uniform(1234, "decoder.layers.0.mlp.linear_fc1.weight", 6)).view(2, 3),
            rtol=0,
            atol=0,
        )

    def test_half_precision_is_the_rounded_fp32(self):
        for dtype in (torch.bfloat16, torch.float16):
            assert filled((64, 64), dtype=dtype).equal(filled((64, 64)).to(dtype))

    def test_xavier_counts_the_global_weight(self):
        """All dims but the last are outputs: [2, 48, 32] is 96 by 32, on every rank."""
        whole = filled((2, 48, 32), init=Init("xavier", 0.5))
        bound = 0.5 * math.sqrt(6 / (96 + 32))
        assert 0.99 * bound < whole.abs().max() < bound
        assert whole.var().item() == pytest.approx(bound**2 / 3, rel=0.1)
        shards = [filled((2, 48, 32), init=Init("xavier", 0.5), dim=1, size=4, rank=rank) for rank in range(4)]
        assert torch.cat(shards, 1).equal(whole)

    def test_constant(self):
        assert filled((5,), init=Init("constant", 1.0)).equal(torch.ones(5))

    def test_normal_distribution(self):
        values = filled((1000, 400)).double() / 0.02
        n = values.numel()
        assert abs(values.mean()) < 5 / math.sqrt(n)
        assert values.var().item() == pytest.approx(1.0, abs=5 * math.sqrt(2 / n))
        assert (values**3).mean().item() == pytest.approx(0.0, abs=5 * math.sqrt(15 / n))
        assert (values**4).mean().item() == pytest.approx(3.0, abs=5 * math.sqrt(96 / n))
        assert 4.5 < values.abs().max() < 5.4, "24 bits reach 5.3 standard deviations"
        for bound in (0.5, 1.0, 2.0):
            share = values.abs().lt(bound).double().mean().item()
            assert share == pytest.approx(math.erf(bound / math.sqrt(2)), abs=5 * 0.5 / math.sqrt(n))

    def test_uniform_distribution(self):
        values = filled((1000, 400), init=Init("uniform", 3.0)).double() / 3.0
        n = values.numel()
        assert abs(values.mean()) < 5 * math.sqrt(1 / 3 / n)
        assert values.var().item() == pytest.approx(1 / 3, abs=5 * math.sqrt(4 / 45 / n))
        assert 0.999 < values.abs().max() < 1.0
        counts = values.histc(16, -1, 1)
        chi_square = ((counts - n / 16) ** 2 / (n / 16)).sum()
        assert chi_square < 40, "15 degrees of freedom: beyond 37.7 once in a thousand"

    def test_neighbours_names_and_seeds_are_uncorrelated(self):
        one = filled((500, 400)).flatten() / 0.02
        n = one.numel()
        others = [
            one.roll(1),
            one.roll(400),
            filled((500, 400), name="a.weigh").flatten() / 0.02,
            filled((500, 400), name="b.weight").flatten() / 0.02,
            filled((500, 400), seed=2).flatten() / 0.02,
        ]
        for other in others:
            assert abs((one * other).mean()) < 5 / math.sqrt(n)
            assert abs(((one**2 - 1) * (other**2 - 1)).mean()) < 5 * 2 / math.sqrt(n)


def slow_uniform(seed, name, count):
    """The generator in Python's integers."""
    key = module._key(seed, name)
    values = []
    for index in range(count):
        z = (index + key) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        top = z >> 40
        values.append(((top if top < 2**23 else top - 2**24) + 0.5) / 2**23)
    return values


class TestGradSlot:
    def test_first_overwrites_then_adds(self):
        slot = slot_of(torch.full((2, 2), float("nan")))
        slot.add(torch.ones(2, 2, dtype=torch.bfloat16))
        slot.add(torch.full((2, 2), 0.5))
        assert slot.main_grad.equal(torch.full((2, 2), 1.5)) and not slot.fresh

    def test_cleared(self):
        slot = slot_of(torch.zeros(2))
        slot.add(torch.ones(2))
        slot.fresh = True
        slot.add(torch.full((2,), 3.0))
        assert slot.main_grad.equal(torch.full((2,), 3.0))

    def test_memory_is_taken_when_the_first_gradient_is_written(self):
        memory, asked = torch.full((2,), float("nan")), []

        def provide():
            asked.append(slot)
            slot.main_grad = memory

        slot = GradSlot(provide)
        assert slot.fresh and not asked, "a slot that nothing writes to takes none"
        slot.add(torch.ones(2))
        slot.add(torch.ones(2))
        assert memory.equal(torch.full((2,), 2.0)) and asked == [slot]
        slot.main_grad = None  # given up: the next writer takes other memory
        memory = torch.zeros(2)
        slot.add(torch.ones(2))
        assert slot.main_grad is memory and len(asked) == 2

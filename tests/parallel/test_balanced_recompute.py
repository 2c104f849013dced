"""--recompute-policy balanced: the ranks of a stage choose alike, within the budget, and no bit of the run changes."""

import dataclasses
import re

import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.config.recompute import RecomputeConfig
from megatron.config.rules.check import check
from megatron.spec.sizes import Target
from megatron.tooling.memory_check import EXPERTS, LLAMA, configured
from megatron.training import balanced_recompute
from megatron.training.setup import build
from tests import pool
from tests.parallel.test_recompute import FEW_STEPS, make, trained
from tests.unit.spec import planned


def balanced(budget, plot=None):
    return RecomputeConfig(recompute_policy="balanced", activation_memory_budget=budget, activation_memory_plot=plot)


def layer_bytes(model, sizes, modules):
    """Bytes that a layer keeps which computes `modules` again in backward."""
    return sum(planned.layer_memory(model, sizes, modules).kept_by_part().values())


def kept(trainer):
    """(layer -> what it recomputes, on this rank; the bytes that all then keep, as a share of all they could)"""
    run, found = trainer.run, trainer.model.decoder._recompute.of_layer
    sizes = planned.sizes_of_run(run, Target(cpu=True))
    keeps = layer_bytes(run.model, sizes, frozenset())
    kept = [sizes.residual if c.is_full else layer_bytes(run.model, sizes, c.modules) for c in found.values()]
    return {number: str(config) for number, config in found.items()}, sum(kept) / (keeps * len(kept))


def compared(run, layout, **changes):
    """(losses, whether a run with `changes` is the same to the bit, and its trainer)"""
    again = dataclasses.replace(run, **changes)
    check(again, layout.world_size)
    (losses, weights, _), (other, those, trainer) = trained(run, layout), trained(again, layout)
    return losses, losses == other and all(a.equal(b) for (_, a), (_, b) in zip(weights, those, strict=True)), trainer


def differs(rank, size, case, budget, steps):
    """(losses, whether the run is the same with a budget, and see `kept`)"""
    run, layout = make(case, steps)
    losses, same, trainer = compared(run, layout, recompute=balanced(budget))
    return losses, same, kept(trainer)


# The second layout's budget is one that only whole layers meet.
@pytest.mark.parametrize(
    ("case", "budget", "steps"),
    [("split backward, sequence parallel", 0.5, 4), ("overlapped optimizer", 0.16, FEW_STEPS)],
)
def test_within_the_budget_alike_and_the_same_bits(case, budget, steps):
    layout = make(case)[1]
    ranks = pool.run(layout.world_size, differs, case, budget, steps)
    for rank, (losses, same, found) in enumerate(ranks):
        assert same and len(set(losses)) == steps
        first_of_stage = ranks[rank - rank % (layout.world_size // layout.pp)][2]
        chosen, share = found
        assert found == first_of_stage and share <= budget
        assert set(chosen.values()) != {"off"}
        assert budget > 0.2 or any("layers" in text for text in chosen.values())


def moved(rank, size, directory):
    """(losses, whether a run whose layers may move is the same as without, and which do)"""
    run, layout = make("gathered keys", FEW_STEPS, layers=4)
    losses, same, trainer = compared(
        run,
        layout,
        recompute=balanced(0.3, str(directory / "front.png")),
        optimizer_offload=dataclasses.replace(run.optimizer_offload, offload_dir=str(directory)),
    )
    offload = trainer.step.features.offload
    return losses, same, [] if offload is None else [n for n in range(4) if offload.actions.policy.layer_ratio(0, n, 4)]


def test_layers_move_where_there_is_other_memory(tmp_path):
    ranks = pool.run(2, with_free_copies, tmp_path)
    for losses, same, places in ranks:
        assert same and len(set(losses)) == FEW_STEPS
        assert places and max(places) < 2  # a stage's last two layers stay
        assert places == ranks[0][2]
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def with_free_copies(rank, size, directory):
    """`moved`, with copies that cost nothing, whatever the disk and the machine do meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balanced_recompute, "measure_bandwidth", lambda *_: (1e18, 1e18))
        return moved(rank, size, directory)


def refused(rank, size, case, budget):
    run, layout = make(case)
    with pytest.raises(ConfigError) as error:
        trained(dataclasses.replace(run, recompute=balanced(budget)), layout)
    return str(error.value)


def test_too_small_a_budget_says_how_much_is_needed():
    for message in pool.run(4, refused, "split backward, sequence parallel", 1000.0):
        assert re.search(
            r"--activation-memory-budget 1000 is 0\.0 MiB on pipeline rank \d, whose layers keep 0\.\d MiB", message
        )


def with_experts(rank, size, flags, budget):
    """(losses without and with a budget, layer -> what it recomputes), of a run with experts on both ranks."""
    run = configured(f"{LLAMA} {EXPERTS} {flags}", size)
    groups, losses = pool.groups(ep=size), []
    for each in (run, dataclasses.replace(run, recompute=balanced(budget))):
        trainer = build(each, groups, torch.device("cpu"))
        losses.append([trainer.train_step().loss for _ in range(2)])
    return *losses, {number: str(config) for number, config in trainer.model.decoder._recompute.of_layer.items()}


def test_layers_with_experts_choose_among_their_own_parts():
    flags = (
        "--expert-model-parallel-size 2 --num-layers 3 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 64 "
        "--seq-length 32 --moe-shared-expert-intermediate-size 64 --moe-layer-freq [0,1,1] --global-batch-size 4"
    )
    first, second = pool.run(2, with_experts, flags, 0.6)
    assert first == second, "the second run of a layer repeats its exchange, so that both ranks need the same choice"
    losses, again, chosen = first
    assert losses == again and set(chosen.values()) != {"off"}
    assert not any("moe" in chosen[0] or "experts" in chosen[0] or "mlp" in chosen[n] for n in (1, 2))

"""--recompute-policy balanced: the ranks of a stage choose alike, within the budget, and no bit of the run changes."""

import dataclasses
import re

import pytest

from megatron.config.recompute import RecomputeConfig
from megatron.config.rules import check
from megatron.core.errors import ConfigError
from megatron.planner.activations import Place, layer_bytes
from megatron.training import balanced_recompute
from megatron.training.setup import build
from tests import pool
from tests.parallel.test_recompute import STEPS, make, trained
from tests.unit.models.builds import CPU


def balanced(budget, plot=None):
    return RecomputeConfig(recompute_policy="balanced", activation_memory_budget=budget, activation_memory_plot=plot)


def choices(run, layout, budget):
    """Layer -> what it recomputes, on this rank; and the bytes that all then keep, as a share of all they could."""
    groups = pool.groups(tp=layout.tp, pp=layout.pp, cp=layout.cp)
    trainer = build(dataclasses.replace(run, recompute=balanced(budget)), groups, CPU)
    found = trainer.model.decoder._recompute.of_layer
    kernel = "math" if run.model.attention_dropout else "fused"
    place = Place(run.data.seq_length, run.train.micro_batch_size, layout.tp, layout.sequence_parallel, kernel, "cpu")
    keeps = sum(layer_bytes(run.model, RecomputeConfig(), place).values())
    whole = run.train.micro_batch_size * run.data.seq_length * run.model.hidden_size * 4
    whole //= layout.tp if layout.sequence_parallel else 1
    kept = [whole if c.is_full else sum(layer_bytes(run.model, c, place).values()) for c in found.values()]
    return {number: str(config) for number, config in found.items()}, sum(kept) / (keeps * len(kept))


def differs(rank, size, case, budgets):
    """(tp rank's choices and bytes by budget, whether a run with the first budget is the same as without)"""
    run, layout = make(case)
    found = {budget: choices(run, layout, budget) for budget in budgets}
    again = dataclasses.replace(run, recompute=balanced(budgets[0]))
    check(again, size)
    (losses, weights), (other, those) = trained(run, layout), trained(again, layout)
    same = losses == other and all(a.equal(b) for (_, a), (_, b) in zip(weights, those, strict=True))
    return found, same and len(set(losses)) == STEPS


# The second layout's budget is one that only whole layers meet.
@pytest.mark.parametrize(
    ("case", "budget"), [("split backward, sequence parallel", 0.5), ("overlapped optimizer", 0.16)]
)
def test_within_the_budget_alike_and_the_same_bits(case, budget):
    layout = make(case)[1]
    ranks = pool.run(layout.world_size, differs, case, (budget,))
    for rank, (found, same) in enumerate(ranks):
        assert same
        first_of_stage = ranks[rank - rank % (layout.world_size // layout.pp)][0]
        chosen, share = found[budget]
        assert found == first_of_stage and share <= budget
        assert set(chosen.values()) != {"off"}
        assert budget > 0.2 or any("layers" in text for text in chosen.values())


def moved(rank, size, directory):
    """(layers that move, whether a run with them is the same as without) with layers that are slow to compute again."""
    run, layout = make("overlapped optimizer")
    again = dataclasses.replace(
        run,
        recompute=balanced(0.3, str(directory / "front.png")),
        optimizer_offload=dataclasses.replace(run.optimizer_offload, offload_dir=str(directory)),
    )
    check(again, size)
    groups = pool.groups(tp=layout.tp)
    offload = build(again, groups, CPU).step.offload
    (losses, weights), (other, those) = trained(run, layout), trained(again, layout)
    same = losses == other and all(a.equal(b) for (_, a), (_, b) in zip(weights, those, strict=True))
    places = [] if offload is None else [n for n in range(4) if offload.actions.policy.share(0, n, 4)]
    return places, same, losses


def test_layers_move_where_there_is_other_memory(tmp_path):
    ranks = pool.run(4, with_free_copies, tmp_path)
    for places, same, _ in ranks:
        assert places and max(places) < 2 and same  # a stage's last two layers stay
        assert places == ranks[0][0]
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def with_free_copies(rank, size, directory):
    """`moved`, with copies that cost nothing, whatever the disk and the machine do meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balanced_recompute, "measured_bandwidth", lambda *_: (1e18, 1e18))
        return moved(rank, size, directory)


def refused(rank, size, case, budget):
    run, layout = make(case)
    with pytest.raises(ConfigError) as error:
        choices(run, layout, budget)
    return str(error.value)


def test_too_small_a_budget_says_how_much_is_needed():
    for message in pool.run(4, refused, "split backward, sequence parallel", 1000.0):
        assert re.search(
            r"--activation-memory-budget 1000 is 0\.0 MiB on pipeline rank \d, whose layers keep 0\.\d MiB", message
        )

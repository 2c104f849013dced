"""The kernels that a device runs without the host knowing the gate do what the CPU does, which looks at it."""

import pytest
import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.config.update_rules import RULES
from megatron.core.optimizer.rules.table import UPDATE_RULES
from megatron.core.optimizer.update_rule import Inputs, gate_of
from megatron.kernels.ops.update_run import UpdateRun

SIZE = 1000
RUNS = [UpdateRun(0, 640, decay=True, decoupled=False), UpdateRun(640, SIZE, decay=False, decoupled=True)]


def made():
    """(master and moments, gradient)"""
    generator = torch.Generator().manual_seed(1)
    keys = ("master", "exp_avg", "exp_avg_sq", "momentum_buffer")
    return {key: torch.rand(SIZE, generator=generator) for key in keys}, torch.randn(SIZE, generator=generator)


def rule_of(name="adam"):
    return UPDATE_RULES[name](OptimizerConfig(optimizer=name), RUNS)


def inputs_of(divisor, found_inf):
    gate = gate_of(torch.tensor(divisor, dtype=torch.float64), torch.tensor(found_inf))
    return Inputs(3, 1e-2, 2e-2, 0.1, gate)


@pytest.mark.parametrize("rule", list(UPDATE_RULES))
@pytest.mark.parametrize("divisor", [1.0, 3.7, 2.0**16])
def test_gated_kernels_update_as_the_cpu_does(rule, divisor):
    """To the last bit, and an undivided gradient is not written."""
    (expected, gradient), (found, same) = made(), made()
    rule_of(rule).step(expected, gradient, None, inputs_of(divisor, False))
    rule_of(rule).apply_gated(found, same, inputs_of(divisor, False))
    assert all(found[key].equal(expected[key]) for key in found)
    assert not found["master"].equal(made()[0]["master"])
    assert divisor != 1.0 or same.equal(made()[1])


@pytest.mark.parametrize("rule", list(UPDATE_RULES))
@pytest.mark.parametrize("divisor", [1.0, 2.0, float("inf"), float("nan")])
@pytest.mark.parametrize("gated", [False, True])
def test_nothing_changes_after_a_gradient_that_is_not_finite(rule, divisor, gated):
    values, gradient = made()
    if gated:
        rule_of(rule).apply_gated(values, gradient, inputs_of(divisor, True))
    else:
        rule_of(rule).step(values, gradient, None, inputs_of(divisor, True))
    assert all(values[key].equal(before) for key, before in made()[0].items())


def test_the_rounded_copy_is_written_all_the_same():
    """Into memory that holds something else."""
    values, gradient = made()
    out = torch.full((SIZE,), 7.0, dtype=torch.bfloat16)
    rule_of().step(values, gradient, out, inputs_of(1.0, True))
    assert out.equal(values["master"].bfloat16())


def test_every_rule_has_a_description_and_the_state_that_it_says():
    assert list(UPDATE_RULES) == list(RULES)
    for name, spec in RULES.items():
        values, gradient = made()
        state = {key: values[key] for key in ("master", *spec.state)}
        rule_of(name).step(state, gradient, None, inputs_of(1.0, False))
        assert not any(state[key].equal(made()[0][key]) for key in state)

"""A pipeline's settings: the schedule that a run gets is checked before it runs."""

import dataclasses

import pytest

from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import pipeline_settings
from megatron.schedule.offload_pass import with_offload
from megatron.schedule.schedule import COMPUTE, Kind, ScheduleError
from megatron.schedule.schedules.one_f_one_b import one_f_one_b


def settings_of(**flags):
    return pipeline_settings(ParallelConfig(pipeline_model_parallel_size=4, **flags), num_layers=16)


def stuck(sizes):
    """The first rank asks for a microbatch's gradient before it sends the next one, which the second rank runs
    first."""
    first, *others = one_f_one_b(sizes)
    return (tuple(sorted(first, key=lambda action: (action.microbatch, action.kind is Kind.BACKWARD))), *others)


def without_the_last_backward(sizes):
    return tuple(actions[:-1] if sizes.m > 1 else actions for actions in one_f_one_b(sizes))


def without_one_backward(sizes):
    first, *others = one_f_one_b(sizes)
    return (first[:-1] if sizes.m > 1 else first, *others)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (stuck, "ranks wait for each other"),
        (without_the_last_backward, r"B7@\d is missing"),
        (without_one_backward, "B7@0 is missing"),
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_schedule_that_cannot_run_is_refused_when_it_is_built(actions, message, overlap):
    good = settings_of(overlap_p2p_communication=overlap)
    broken = dataclasses.replace(good, schedule=dataclasses.replace(good.schedule, actions=actions))
    broken.schedule_of(1)
    with pytest.raises(ScheduleError, match=message):
        broken.schedule_of(8)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_training_and_evaluation(name):
    settings = settings_of(pipeline_schedule=name)
    computed = {a.kind for actions in settings.schedule_of(8).actions for a in actions} & COMPUTE
    assert computed == {Kind.FORWARD, *((Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) if name == "zb-v" else (Kind.BACKWARD,))}
    evaluated = {a.kind for actions in settings.evaluation_of(8).actions for a in actions}
    assert evaluated & COMPUTE == {Kind.FORWARD}
    assert settings.schedule_of(8) is settings.schedule_of(8), "built and checked once"
    assert settings.schedule_of(8, checked=False) == settings.schedule_of(8)
    assert settings.schedule_of(8, offload=True) == with_offload(settings.schedule_of(8)) != settings.schedule_of(8)

"""config/elastic.py: which processes train, and with which micro batch, for every number of processes of a job."""

import pytest

from megatron.config.elastic import fitted, training_world
from megatron.config.mesh import mesh_of
from megatron.config.rules.check import problems
from megatron.config.settings import resolve
from tests.unit.config.runs import make_run

EXPERTS = {
    "num_experts": 4,
    "add_bias_linear": False,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
}


def elastic(**fields):
    return make_run(**{"elastic_world": True, "global_batch_size": 8, "micro_batch_size": 4, **fields})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # (training processes, micro batch) of 1, 2, ... processes
        ({}, [(1, 4), (2, 4), (2, 4), (4, 2), (4, 2), (4, 2), (4, 2), (8, 1), (8, 1)]),
        ({"global_batch_size": 12}, [(1, 4), (2, 2), (3, 4), (4, 1), (4, 1), (6, 2)]),
        ({"micro_batch_size": 3, "global_batch_size": 12}, [(1, 3), (2, 3), (3, 1), (4, 3)]),
        # A replica of two processes: the one left over waits.
        ({"tensor_model_parallel_size": 2}, [None, (2, 4), (2, 4), (4, 4), (4, 4), (4, 4), (4, 4), (8, 2)]),
        # Every batch of a ramp or a schedule is whole.
        ({"rampup_batch_size": (4, 2, 20)}, [(1, 2), (2, 1), (2, 1), (2, 1)]),
        ({"global_batch_size": None, "step_batch_size_schedule": "0:4 1K:8"}, [(1, 4), (2, 2), (2, 2), (4, 1)]),
        # Instances of the optimizer have equally many ranks, and experts whole groups.
        (
            {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": True},
            [None, (2, 4), (2, 4), (4, 2)],
        ),
        (EXPERTS, [None, (2, 4), (2, 4), (4, 4)]),
    ],
)
def test_every_number_of_processes_has_an_answer(fields, expected):
    run = elastic(**fields)
    for world_size, answer in enumerate(expected, 1):
        training, fit = training_world(run, world_size), fitted(run, world_size)
        if answer is None:
            assert training == world_size and problems(fit, training)
            continue
        assert (training, fit.train.micro_batch_size) == answer
        assert problems(fit, training) == []
        assert training_world(fit, world_size) == training  # main asks again
        batches = resolve(fit, mesh_of(fit.parallel, training)).batches
        assert batches.final_global_batch_size == 8 or "global_batch_size" in fields
        changed = {note.flag: (note.requested, note.in_effect) for note in fit.notes}
        assert ("--elastic-world" in changed) == (training != world_size)
        assert ("--micro-batch-size" in changed) == (answer[1] != run.train.micro_batch_size)


def test_answers_of_a_prompt_stay_together():
    fields = {"perform_rl_step": True, "grpo_group_size": 4, "grpo_prompts_per_step": 2}
    assert [training_world(elastic(**fields), size) for size in (1, 2, 3, 4)] == [1, 2, 2, 2]


def test_a_run_that_is_not_elastic_stays_as_it_is():
    run = make_run(global_batch_size=8, micro_batch_size=4)
    assert training_world(run, 3) == 3 and fitted(run, 3) is run and problems(run, 3)

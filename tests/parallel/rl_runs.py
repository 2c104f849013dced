"""Small runs that learn from rewards, built without files: their tokenizer's ids are their text."""

import torch

from megatron.command_line.read import read
from megatron.config.rules.check import check
from megatron.config.run import with_batch_of_answers
from megatron.core.comm.collectives import gather_objects
from megatron.core.datasets.sample import Splits
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from megatron.rl.answers import Response
from megatron.rl.sampler import Sampler, sample_seed
from megatron.training.setup import assemble, read_files
from megatron.training.start import take_shape_from_files
from tests import pool

CPU = torch.device("cpu")
SHAPE = "--preset llama-tiny --num-layers 4 --hidden-size 64 --ffn-hidden-size 128"
MODEL = f"""
    {SHAPE} --seq-length 64
    --micro-batch-size 1 --train-iters 3 --lr 1e-3
    --tokenizer-type NullTokenizer --vocab-size 64 --make-vocab-size-divisible-by 8 --device cpu --perform-rl-step
"""
SMALL = f"""
    {MODEL} --prompt-data none --rm-type length --rollout-max-response-len 16
    --grpo-prompts-per-step 4 --grpo-group-size 2
"""
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type none
"""
DELTA = """
    --experimental-attention-variant gdn --linear-attention-freq 2 --linear-num-key-heads 2 --linear-num-value-heads 4
    --linear-key-head-dim 8 --linear-value-head-dim 8
"""
ZERO_3 = "--data-parallel-sharding-strategy optim_grads_params"
HOST = "--cpu-offloading-weights --cpu-offloading-num-layers 2"
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
GROUP, LONGEST = 2, 16


def read_run(world_size, words):
    """Returns (the run of a command line, groups for it)."""
    line = read(words.split())
    assert not line.problems, line.problems
    run = with_batch_of_answers(take_shape_from_files(line.run))
    check(run, world_size)
    parallel = run.parallel
    groups = pool.groups(
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
        instances=run.data_parallel_settings().optimizer_instances,
    )
    return run, groups


def make_trainer(world_size, words):
    """Returns (a trainer without data, its tokenizer). A Hugging Face folder has its own shape."""
    small = SMALL.replace(SHAPE, "") if "--load-hf" in words else SMALL
    run, groups = read_run(world_size, f"{small} {words}")
    run, checkpoint, tokenizer = read_files(run, groups)
    streams = Streams(CPU, Timeline(CPU))
    trainer = assemble(run, checkpoint, groups, streams, lambda settings, state: Splits(None, None, None))
    return trainer, tokenizer


def make_sampler(trainer, tokenizer):
    """Returns a sampler of short answers."""
    return Sampler(
        trainer,
        tokenizer,
        temperature=trainer.run.rl.rollout_temperature,
        batch_size=3,
    )


def sampled(sampler, groups):
    """All answers to PROMPTS, on every rank; each replica samples its share."""
    requests = [(prompt, number) for prompt in range(len(PROMPTS)) for number in range(GROUP)]
    rank, size = groups.dp_cp.rank, groups.dp_cp.size
    share = requests[rank * len(requests) // size : (rank + 1) * len(requests) // size]
    completions = sampler.sample(
        [PROMPTS[prompt] for prompt, _ in share],
        [sample_seed(1, prompt, number) for prompt, number in share],
        [LONGEST] * len(share),
    )
    answers = [
        Response(
            prompt=prompt,
            number=number,
            prompt_ids=tuple(PROMPTS[prompt]),
            ids=tuple(completion.ids),
            logprobs=completion.logprobs,
            sampler_rank=rank,
            text=completion.text,
            is_cut=completion.reason == "length",
            reward=float(number),
        )
        for (prompt, number), completion in zip(share, completions, strict=True)
    ]
    parts = gather_objects(answers if groups.model.rank == 0 else [], groups.world)
    return sorted((answer for part in parts for answer in part), key=lambda answer: (answer.prompt, answer.number))

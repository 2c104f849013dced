"""Checks that a model trains equally under every layout: losses and first gradients of small runs against one process.

A wrong gradient that appears only under some layout trains to a slightly worse model and is never noticed. This runs
the user's own flags at reduced size, on CPU processes with gloo, in fp32.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import multiprocessing
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.base.log import setup_logging
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.layers import written
from megatron.config.model import ModelConfig
from megatron.config.rules.check import check
from megatron.config.rules.model import groups_divide_heads, heads_divide_hidden, shape_is_given
from megatron.config.rules.ranges import numbers_are_in_range
from megatron.config.run import RunConfig
from megatron.config.train import EvalConfig, LoggingConfig, TrainConfig
from megatron.core.groups import Groups
from megatron.core.optimizer.optimizer import Update
from megatron.tooling.layouts import ParityLayout, under
from megatron.training.process import start_process
from megatron.training.routing_trace import ExpertChoices, RoutingTrace
from megatron.training.setup import build
from megatron.training.trainer import Trainer

SEQ_LENGTH, VOCAB_SIZE, HEAD_DIM, LARGEST_TP, LARGEST_EP = 64, 509, 16, 4, 8
START_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Measurement:
    """One run: the loss and the gradient norm of every step, and the global gradient of every parameter at the first
    step.

    Of a model with experts also the balance losses of every step, the biases after it by (step, name), the choices, and
    what the experts' capacity keeps of them: see RoutingTrace.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)
    balance: list[dict[str, float]] = field(default_factory=list)
    biases: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    choices: ExpertChoices = field(default_factory=dict)
    margins: ExpertChoices = field(default_factory=dict)
    capacity_margins: ExpertChoices = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """The distance of a run from the reference."""

    loss: float  # largest |a - b| / |b| over the steps
    gradient: float  # largest over parameters of max |a - b| / max |b|, see `compare`
    parameter: str  # the parameter with that difference
    norm: float  # as `loss`, of gradient norms
    balance: float  # as `loss`, of balance losses
    # Step, layer, and place in its sample of a token with other experts, and the margin of its choice
    # (`routing.margins`), or of a token that experts at their capacity take in one run only (`capacity_margins`).
    choice: tuple[int, int, int, float] | None
    same_biases: bool  # bit for bit


def reduced(run: RunConfig, steps: int, layers: int = 2) -> RunConfig:
    """Returns the run's model with its features at reduced size, on mock data, in fp32, without FP8 and dropout.

    layers: an even number; a pattern of layers, as of windows, alternates.

    Raises ConfigError for an invalid shape. The rest is checked for each layout.
    """
    for rule in (  # sizes that are divided here
        partial(numbers_are_in_range, run),
        partial(shape_is_given, run.model),
        partial(heads_divide_hidden, run.model),
        partial(groups_divide_heads, run.model),
    ):
        problem = rule()
        if problem is not None:
            raise ConfigError(problem)
    model = run.model
    assert model.num_attention_heads
    per_group = min(4, model.num_attention_heads // model.num_kv_heads)
    heads = LARGEST_TP * per_group
    hidden = heads * HEAD_DIM
    ratio = model.ffn_dim / model.hidden_size if model.hidden_size else 4.0
    windows = model.windows if model.num_layers else ()
    small: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "kv_channels": HEAD_DIM,
        "num_query_groups": math.gcd(model.num_kv_heads, LARGEST_TP) if model.group_query_attention else None,
        "ffn_hidden_size": max(1, round(hidden * ratio / 8)) * 8,
        "vocab_size": VOCAB_SIZE,  # not a multiple of any size, so that padding is tested
        "make_vocab_size_divisible_by": 8,
        "max_position_embeddings": _small_context(model, run.data.seq_length),
        # Every second layer with the window, if the model has both kinds; shorter than the samples.
        "window_size": None if model.window is None else f"{min(model.window, SEQ_LENGTH // 2) - 1},0",
        "window_attn_skip_freq": f"[1,0]*{layers // 2}" if any(windows) and not all(windows) else None,
        "no_rope_freq": None if model.no_rope_freq is None else f"[0,1]*{layers // 2}",
        **(_small_longrope(model, run.data.seq_length) if model.position_embedding_type == "longrope" else {}),
        **({} if model.llama_4_scaling_beta is None else _small_original(model, run.data.seq_length)),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **_small_latents(model),
        **_small_delta_nets(model, layers),
        **_small_experts(model, max(1, round(hidden * ratio / 8)) * 8, layers),
        "bf16": False,
        "fp16": False,
        "attention_backend": "unfused" if model.attention_backend == "unfused" else "auto",  # flash needs a GPU
    }
    return RunConfig(
        model=dataclasses.replace(model, **small),
        parallel=dataclasses.replace(
            run.parallel, device="cpu", distributed_backend=None, ddp_bucket_size=20_000, distributed_timeout_minutes=5
        ),
        moe=run.moe,
        optimizer=dataclasses.replace(run.optimizer, loss_scale=None),
        schedule=dataclasses.replace(
            run.schedule, lr=run.schedule.lr or 3e-4, lr_decay_iters=None, lr_decay_samples=None, lr_warmup_iters=0,
            lr_warmup_samples=0, lr_decay_style="constant", min_lr=0.0,
        ),
        data=DataConfig(
            seq_length=SEQ_LENGTH, mock_data=True, num_workers=0, reset_position_ids=run.data.reset_position_ids,
            reset_attention_mask=run.data.reset_attention_mask, eod_mask_loss=run.data.eod_mask_loss,
        ),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer"),
        train=TrainConfig(
            micro_batch_size=1, global_batch_size=8, train_iters=steps, seed=run.train.seed,
            calculate_per_token_loss=run.train.calculate_per_token_loss,
            mtp_loss_scaling_factor=run.train.mtp_loss_scaling_factor,
        ),
        eval=EvalConfig(eval_iters=0),
        logging=LoggingConfig(log_interval=1_000_000),
        checkpoint=CheckpointConfig(),
    )  # fmt: skip


def _small_latents(model: ModelConfig) -> dict[str, Any]:
    """Heads of 12 channels of queries and keys, 4 of them rotated, and of fewer or more of values, as before."""
    if not model.multi_latent_attention:
        return {}
    return {
        "q_lora_rank": None if model.q_lora_rank is None else 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6 if model.v_head_dim <= model.qk_head_dim else 10,
    }


def _small_delta_nets(model: ModelConfig, layers: int) -> dict[str, Any]:
    """In every second layer, with as many value heads for each key head as before and at most 2."""
    if not model.has_delta_net:
        return {}
    return {
        "linear_attention_freq": f"[1,0]*{layers // 2}",
        "linear_num_key_heads": LARGEST_TP,
        "linear_num_value_heads": LARGEST_TP * min(2, model.linear_num_value_heads // model.linear_num_key_heads),
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }


def _small_experts(model: ModelConfig, dense_width: int, layers: int) -> dict[str, Any]:
    """8 experts in as many groups as fit, of which a token has as many as before and at most 4."""
    if model.num_experts is None:
        return {}
    groups = None if model.moe_router_num_groups is None else math.gcd(model.moe_router_num_groups, LARGEST_EP // 2)
    taken = None if groups is None else max(1, min(model.moe_router_group_topk or 1, groups // 2))
    most = 4 if taken is None or groups is None else taken * LARGEST_EP // groups
    mixed = any(model.moe_layers) and not all(model.moe_layers)
    shared = model.moe_shared_expert_intermediate_size
    return {
        "num_experts": LARGEST_EP,
        "moe_router_topk": min(model.moe_router_topk, most),
        "moe_router_num_groups": groups,
        "moe_router_group_topk": taken,
        "moe_ffn_hidden_size": max(8, dense_width // 8 // LARGEST_TP * LARGEST_TP),
        "moe_layer_freq": f"[0,1]*{layers // 2}" if mixed else None,
        "moe_shared_expert_intermediate_size": None if shared is None else 24,
    }


def _small_context(model: ModelConfig, seq_length: int | None) -> int:
    """The longest sequence, or half of it where dynamic NTK scaling stretches the context of samples."""
    context = model.max_position_embeddings
    if model.dynamic_ntk_factor is None or context is None or seq_length is None or seq_length <= context:
        return SEQ_LENGTH
    return SEQ_LENGTH // 2


def _small_original(model: ModelConfig, seq_length: int | None) -> dict[str, Any]:
    """An original context below the length of samples, if that of the model is."""
    assert seq_length
    is_long = seq_length > model.rope_scaling_original_max_position_embeddings
    return {"rope_scaling_original_max_position_embeddings": SEQ_LENGTH // 2 if is_long else SEQ_LENGTH}


def _small_longrope(model: ModelConfig, seq_length: int | None) -> dict[str, Any]:
    """LongRoPE of fewer channels, with those of its lists that samples of `seq_length` tokens have."""
    pairs = int(HEAD_DIM * model.rotary_percent) // 2
    lists = ([factors[at * len(factors) // pairs] for at in range(pairs)] for factors in model.longrope_factors)
    factors = dict(zip(("short_factor", "long_factor"), map(written, lists), strict=True))
    return {**factors, **_small_original(model, seq_length)}


@dataclass(frozen=True)
class RankMeasurement:
    """A rank's part of a Measurement. pieces: (name, (offset, global shape), piece) of its gradients."""

    losses: list[float]
    pieces: list[tuple[str, Any, Any]]
    norms: list[float] = field(default_factory=list)
    balance: list[dict[str, float]] = field(default_factory=list)
    biases: dict[tuple[int, str], Any] = field(default_factory=dict)
    choices: dict[tuple[int, str, int], Any] = field(default_factory=dict)
    margins: dict[tuple[int, str, int], Any] = field(default_factory=dict)
    capacity_margins: dict[tuple[int, str, int], Any] = field(default_factory=dict)

    def as_arrays(self) -> RankMeasurement:
        """To send between processes: a tensor would need shared memory."""
        return dataclasses.replace(
            self,
            pieces=[(name, place, piece.numpy()) for name, place, piece in self.pieces],
            biases={place: bias.numpy() for place, bias in self.biases.items()},
            choices={place: chosen.numpy() for place, chosen in self.choices.items()},
            margins={place: margin.numpy() for place, margin in self.margins.items()},
            capacity_margins={place: margin.numpy() for place, margin in self.capacity_margins.items()},
        )


def measure(
    run: RunConfig,
    groups: Groups,
    device: torch.device,
    forced: ExpertChoices | None = None,
    forced_capacity: ExpertChoices | None = None,
) -> RankMeasurement:
    """Returns the measurements of this rank. forced: choices of experts to follow, and with forced_capacity also what
    the experts kept of them: see RoutingTrace. Collective over the world."""
    trainer = build(run, groups, device)
    with first_gradients(trainer) as pieces:
        measurement = trained(trainer, trainer.batches.total_iterations, forced, forced_capacity)
    return dataclasses.replace(measurement, pieces=pieces)


def trained(
    trainer: Trainer,
    steps: int,
    forced: ExpertChoices | None = None,
    forced_capacity: ExpertChoices | None = None,
) -> RankMeasurement:
    """Returns the measurements of this rank in the next `steps` steps, without gradients. Collective over the world.

    Steps are numbered from the start of the run. forced, forced_capacity: see `measure`.
    """
    first = trainer.state.iteration
    trace = RoutingTrace(forced, first, forced_capacity)
    if trainer.step.features.experts is not None:
        trainer.step.features.experts.trace = trace
    reports, biases = [], {}
    for number in range(first, first + steps):
        reports.append(trainer.train_step())
        for name, buffer in trainer.model.named_buffers():
            biases[number, name] = buffer.clone()
    return RankMeasurement(
        [report.loss for report in reports],
        [],
        [report.grad_norm for report in reports],
        [{} if report.experts is None else report.experts.means for report in reports],
        biases,
        trace.choices,
        trace.margins,
        trace.capacity_margins,
    )


@contextmanager
def first_gradients(trainer: Trainer) -> Iterator[list[tuple[str, Any, Tensor]]]:
    """The next step fills this list with the rank's share of its reduced gradients, before it updates parameters."""
    pieces: list[tuple[str, Any, Tensor]] = []
    step, update = trainer.step, trainer.step.update

    def copy_and_update(lr: float, weight_decay: float, decoupled_lr: float | None = None) -> Update:
        step.update = update  # type: ignore[method-assign]
        for name, offset, gradient in trainer.data_parallel.gradients():
            pieces.append((name, (offset, trainer.parameters[name].info.spec.shape), gradient.clone()))
        return update(lr, weight_decay, decoupled_lr)

    step.update = copy_and_update  # type: ignore[method-assign]
    yield pieces


def assemble(ranks: Sequence[RankMeasurement]) -> Measurement:
    """Returns one measurement from those of all ranks. Raises AssertionError if two ranks disagree on shared
    elements."""
    first, gradients = ranks[0], dict[str, Tensor]()
    biases, choices = dict[tuple[int, str], Tensor](), ExpertChoices()
    for rank in ranks:
        assert rank.losses == first.losses, "ranks report different losses"
        assert (rank.norms, rank.balance) == (first.norms, first.balance), (
            "ranks report different norms or balance losses"
        )
        for name, (offset, shape), piece in rank.pieces:
            whole = gradients.setdefault(name, torch.full(shape, float("nan")))
            piece = torch.as_tensor(piece)
            rows = tuple(slice(start, start + n) for start, n in zip(offset, piece.shape, strict=True))
            written_part = whole[rows]
            if not written_part.isnan().all():
                torch.testing.assert_close(
                    written_part, piece, rtol=1e-5, atol=1e-7, msg=f"replicas disagree on {name}"
                )
            whole[rows] = piece
        for place, bias in rank.biases.items():
            assert torch.equal(biases.setdefault(place, torch.as_tensor(bias)), torch.as_tensor(bias)), place
        for key, experts in rank.choices.items():
            chosen = choices.setdefault(key, torch.as_tensor(experts).clone())
            torch.maximum(chosen, torch.as_tensor(experts), out=chosen)
    margins, capacity_margins = (
        _least([getattr(rank, of) for rank in ranks]) for of in ("margins", "capacity_margins")
    )
    return Measurement(first.losses, gradients, first.norms, first.balance, biases, choices, margins, capacity_margins)


def _least(margins_of_ranks: Sequence[dict[tuple[int, str, int], Any]]) -> ExpertChoices:
    """Returns the margins of whole samples; those of tokens that a rank does not hold are infinite there."""
    margins = ExpertChoices()
    for of_rank in margins_of_ranks:
        for key, margin in of_rank.items():
            least = margins.setdefault(key, torch.as_tensor(margin).clone())
            torch.minimum(least, torch.as_tensor(margin), out=least)
    return margins


def compare(reference: Measurement, other: Measurement) -> Difference:
    """Returns the Difference of two runs. A NaN on either side is a difference of NaN.

    Some true gradients are zero and hold only rounding: softmax is invariant to a bias of all keys, so without rotary
    embedding its gradient is zero. So max |b| counts as at least a hundredth of the largest gradient of the model.
    """
    largest = {name: gradient.abs().max() for name, gradient in reference.gradients.items()}
    floor = torch.stack(list(largest.values())).max() / 100
    worst = torch.stack(
        [
            (other.gradients[name] - gradient).abs().max() / largest[name].maximum(floor)
            for name, gradient in reference.gradients.items()
        ]
    )
    balance = [[value for step in run.balance for value in step.values()] for run in (reference, other)]
    # torch's max and argmax treat a NaN as the largest; Python's max may skip it.
    return Difference(
        _largest(reference.losses, other.losses),
        float(worst.max()),
        list(largest)[int(worst.argmax())],
        _largest(reference.norms, other.norms),
        _largest(*balance),
        _first_other_choice(reference, other),
        reference.biases.keys() == other.biases.keys()
        and all(torch.equal(bias, other.biases[place]) for place, bias in reference.biases.items()),
    )


def _largest(reference: Sequence[float], other: Sequence[float]) -> float:
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (other, reference))
    return float(((a - b) / b).abs().max()) if len(b) else 0.0


def _first_other_choice(reference: Measurement, other: Measurement) -> tuple[int, int, int, float] | None:
    """Step, layer, place and margin of the first token whose experts differ, or are at their capacity in one run."""
    assert reference.choices.keys() == other.choices.keys(), "the runs routed other samples or layers"
    for step, sample, layer in sorted(reference.choices):
        key = step, sample, layer
        (mine, slots), (theirs, other_slots) = (run.choices[key].sort(dim=1) for run in (reference, other))
        differs = (mine != theirs).any(1)
        if differs.any():
            place = int(differs.nonzero()[0])
            return step, layer, place, float(reference.margins[key][place])
        if key in reference.capacity_margins:
            margins = reference.capacity_margins[key].gather(1, slots)
            differing = (margins > 0) != (other.capacity_margins[key].gather(1, other_slots) > 0)
            if differing.any():
                place, slot = differing.nonzero()[0].tolist()
                return step, layer, place, abs(float(margins[place, slot]))
    return None


def run_layout(run: RunConfig, layout: ParityLayout, followed: Measurement | None = None) -> Measurement:
    """Trains under `layout` in new CPU processes. followed: a run of the same samples whose choices of experts, and of
    the tokens that they keep, are taken."""
    run = under(run, layout)
    check(run, layout.world_size)
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(layout.world_size):
        receiver, sender = context.Pipe()
        processes.append(
            context.Process(target=_worker, args=(run, rank, layout.world_size, port, sender, followed), daemon=True)
        )
        processes[-1].start()
        sender.close()
        pipes.append(receiver)
    try:
        return assemble([_receive(pipe, layout) for pipe in pipes])
    finally:
        for process in processes:
            process.kill()


def _receive(pipe: Connection, layout: ParityLayout) -> Any:
    if not pipe.poll(START_TIMEOUT_SECONDS):
        raise RuntimeError(f"{layout}: no answer for {START_TIMEOUT_SECONDS} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError(f"{layout}: a process ended without an answer; its error is above") from None


def _worker(
    run: RunConfig, rank: int, world_size: int, port: int, pipe: Connection, followed: Measurement | None
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    setup_logging(rank, level=logging.WARNING)
    torch.set_num_threads(1)
    groups, device = start_process(run.parallel, rank, world_size, rank, world_size)
    forced = (None, None) if followed is None else (followed.choices, followed.capacity_margins)
    pipe.send(measure(run, groups, device, *forced).as_arrays())

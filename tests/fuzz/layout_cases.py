"""Draws random models under random layouts and memory features, for the campaigns that train them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError
from megatron.command_line.read import parse
from megatron.config.rules.check import check
from megatron.config.run import RunConfig

STEPS, SAVED_AT = 5, 3
BF16 = ("--bf16",)
LORA = ("--lora-rank", "4")
ATTENTION = ("--lora-target-modules", "linear_qkv", "linear_proj")  # routed experts take no adapters

# Flags of a case, as on the command line: ("--swiglu",) or ("--num-layers", "4").
Flags = tuple[tuple[str, ...], ...]

ALWAYS: Flags = (
    ("--mock-data",),
    ("--tokenizer-type", "NullTokenizer"),
    ("--device", "cpu"),
    ("--num-workers", "0"),
    ("--eval-iters", "0"),
    ("--log-interval", "1000000"),
    ("--lr", "1e-3"),
    ("--train-iters", str(STEPS)),
    ("--attention-dropout", "0"),
    ("--hidden-dropout", "0"),
    ("--vocab-size", "61"),
    ("--make-vocab-size-divisible-by", "8"),
    ("--ddp-bucket-size", "3000"),
)


@dataclass(frozen=True)
class Case:
    """world: processes. then: the world and layout under which the checkpoint continues."""

    world: int
    model: Flags
    layout: Flags
    features: Flags
    then: tuple[int, Flags] | None = None


def draw(rng: random.Random, share: float = 0.25, worlds: Sequence[int] = (1, 2, 2, 4, 4)) -> Case:
    """Nearly always one that the rules accept: a case that is refused tests only the rule. share: of cases with
    experts."""
    kept_though_refused = rng.random() < 0.1
    for attempt in range(100):
        if attempt % 10 == 0:  # else layouts that few models fit would hardly be drawn
            world, layout = draw_layout(rng, worlds)
            then = draw_layout(rng, worlds) if rng.random() < 0.5 else None
        case = with_experts(with_delta_nets(Case(world, draw_model(rng), layout, draw_features(rng), then)), share)
        if kept_though_refused:
            break
        with contextlib.suppress(UserError):
            runs_of(case, Path("unused"))
            break
    return case


def draw_model(rng: random.Random) -> Flags:
    """A small decoder; batch sizes and adapters belong to it, since they change its training."""
    heads = rng.choice([4, 4, 8])
    found: list[tuple[Any, ...]] = [
        ("--num-layers", rng.choice([1, 2, 3, 4, 4, 8, 8])),
        ("--hidden-size", heads * 8),
        ("--num-attention-heads", heads),
        ("--ffn-hidden-size", rng.choice([32, 48, 64])),
        ("--seq-length", rng.choice([16, 24, 32])),
        ("--micro-batch-size", rng.choice([1, 1, 2])),
        ("--global-batch-size", rng.choice([4, 8, 8])),
        ("--position-embedding-type", rng.choice(["rope", "rope", "learned_absolute", "none", "yarn", "longrope"])),
        ("--normalization", rng.choice(["RMSNorm", "LayerNorm"])),
    ]
    if ("--position-embedding-type", "rope") in found:
        found += some(rng, 0.2, ("--no-rope-freq", 2), ("--rotary-interleaved",), ("--rotary-percent", 0.5))
    if ("--position-embedding-type", "longrope") in found:  # shorter or longer than the samples
        found += [
            ("--rope-scaling-original-max-position-embeddings", rng.choice([12, 20, 64])),
            ("--short-factor", "1.0,1.5,2.0,4.0"),
            ("--long-factor", "1.0,3.0,9.0,27.0"),
        ]
    if rng.random() < 0.5:
        found += [("--group-query-attention",), ("--num-query-groups", rng.choice([1, 2, heads // 2]))]
    activation = rng.choice(
        [("--swiglu",), ("--geglu",), ("--quick-geglu",), ("--squared-relu",), ("--openai-gelu",), ("--xielu",), None]
    )
    found += [activation] if activation else []
    if rng.random() < 0.2:
        found += [("--window-size", f"{rng.choice([3, 7])},0")]
    found += some(rng, 0.15, ("--attn-logit-softcapping", 0.5), ("--softmax-scale", 0.5))
    if rng.random() < 0.2:
        found.append(("--softmax-type", rng.choice(["learnable", "off-by-one"])))
    if activation in (("--swiglu",), ("--geglu",), ("--quick-geglu",)) and rng.random() < 0.2:
        found += [("--activation-func-clamp-value", 0.1), ("--glu-linear-offset", 1.0)]
    found += some(rng, 0.15, ("--final-logit-softcapping", 0.5), ("--apply-layernorm-1p",))
    found += some(
        rng,
        0.4,
        ("--disable-bias-linear",),
        ("--add-qkv-bias",),
        ("--add-output-layer-bias",),
        ("--qk-layernorm",),
        ("--untie-embeddings-and-output-weights",),
        ("--calculate-per-token-loss",),
        ("--z-loss-coeff", 0.01),
    )
    found += some(
        rng, 0.15, ("--embedding-multiplier-scale", 3), ("--residual-multiplier", 0.4), ("--logits-scaling", 1.5)
    )
    found += rng.choice(
        [[], [], [], [("--post-norm",)], [("--post-norm",), ("--no-pre-norm",)], [("--parallel-residual",)]]
    )
    if ("--parallel-residual",) in found:
        found += some(rng, 0.5, ("--shared-norm",))
    if ("--qk-layernorm",) in found and ("--normalization", "RMSNorm") in found:
        found += some(rng, 0.5, ("--qk-layernorm-across-heads",))
    found += some(rng, 0.15, LORA)
    rotates = any(("--position-embedding-type", kind) in found for kind in ("rope", "yarn", "longrope"))
    if ("--qk-layernorm",) in found and rotates:
        found += some(rng, 0.5, ("--qk-layernorm-after-rope",))
    if ("--position-embedding-type", "rope") in found and rng.random() < 0.2:  # shorter or longer than the samples
        found += [("--dynamic-ntk-factor", 4), ("--max-position-embeddings", rng.choice([12, 64]))]
    return words(found)


def with_delta_nets(case: Case, share: float = 0.1) -> Case:
    """A `share` of the cases, as each decides itself, with gated delta nets in some layers."""
    rng = random.Random(f"delta nets {case!r}")
    if rng.random() > share:
        return case
    found: list[tuple[Any, ...]] = [
        ("--experimental-attention-variant", "gdn"),
        ("--linear-attention-freq", 2),
        ("--linear-num-key-heads", 4),
        ("--linear-num-value-heads", rng.choice([4, 8])),
        ("--linear-key-head-dim", 6),
        ("--linear-value-head-dim", 10),
        ("--linear-conv-kernel-dim", rng.choice([2, 4])),
        *some(rng, 0.7, ("--attention-output-gate",)),
    ]
    return Case(case.world, (*case.model, *words(found)), case.layout, case.features, case.then)


def with_experts(case: Case, share: float) -> Case:
    """A `share` of the cases, as each decides itself, with experts under any ep and etp, and with features that only
    they have."""
    rng = random.Random(repr(case))
    if rng.random() > share:
        return case
    layouts = [_with_expert_axes(rng, world, layout) for world, layout in [(case.world, case.layout), *_rest(case)]]
    features = [flag for flag in case.features if flag[0] not in ("--recompute-granularity", "--recompute-modules")]
    if len(features) < len(case.features) and not any("--recompute-method" in flag for flag in features):
        part = rng.choice(["moe", "moe_act", "shared_experts", "core_attn"])
        features += [("--recompute-granularity", "selective"), ("--recompute-modules", part)]
    else:
        features = list(case.features)
    then = (case.then[0], layouts[1]) if case.then else None
    return Case(case.world, (*case.model, *draw_experts(rng, case.model)), layouts[0], words(features), then)


def draw_experts(rng: random.Random, model: Flags) -> Flags:
    """Experts, router and balance of this decoder."""
    found: list[tuple[Any, ...]] = [] if ("--disable-bias-linear",) in model else [("--disable-bias-linear",)]
    if rng.random() < 0.1:
        found += [ATTENTION] if LORA in model else []
        one = ("--moe-router-topk", 1), ("--moe-router-score-function", "sigmoid")
        more = ("--moe-router-topk", 2), ("--moe-router-pre-softmax",)
        found += [("--num-experts", 4), ("--moe-router-load-balancing-type", "sinkhorn"), *rng.choice([one, more])]
        return words(found)
    kinds = rng.choice([["aux_loss"], ["seq_aux_loss"], ["global_aux_loss"], ["none"], ["aux_loss", "global_aux_loss"]])
    found += [
        ("--num-experts", rng.choice([4, 8])),
        ("--moe-router-topk", rng.choice([1, 2, 2, 3])),
        ("--moe-ffn-hidden-size", rng.choice([16, 24])),
        ("--moe-router-load-balancing-type", *kinds),
        ("--moe-aux-loss-coeff", *(rng.choice([0, 0.01, 0.1]) for _ in kinds)),
    ]
    found += rng.choice([[("--moe-router-score-function", "sigmoid")], [("--moe-router-pre-softmax",)], []])
    if ("--moe-router-score-function", "sigmoid") in found and rng.random() < 0.6:
        found += [("--moe-router-enable-expert-bias",), ("--moe-router-bias-update-rate", 0.05)]
    if rng.random() < 0.3:
        found += [("--moe-router-num-groups", 4), ("--moe-router-group-topk", 2), ("--moe-router-group-score", "max")]
    if rng.random() < 0.3:
        found += [("--moe-shared-expert-intermediate-size", 16), *some(rng, 0.5, ("--moe-shared-expert-gate",))]
    elif LORA in model:
        found.append(ATTENTION)
    if rng.random() < 0.3:
        found.append(("--moe-expert-capacity-factor", rng.choice([0.5, 1.25])))
        found += some(rng, 0.5, ("--moe-token-drop-policy", "position"))
    found += some(rng, 0.3, ("--moe-layer-freq", 2), ("--moe-z-loss-coeff", 0.01))
    found += some(rng, 0.2, ("--moe-token-dispatcher-type", "allgather"), ("--moe-router-topk-scaling-factor", 2.5))
    return words(found)


def _rest(case: Case) -> list[tuple[int, Flags]]:
    return [case.then] if case.then else []


def _with_expert_axes(rng: random.Random, world: int, layout: Flags) -> Flags:
    """Experts are sharded over any ranks of a pipeline stage; tp needs sequence parallelism with them."""
    pp = next((int(flag[1]) for flag in layout if flag[0] == "--pipeline-model-parallel-size"), 1)
    ranks = world // pp
    ep, etp = rng.choice([(ep, etp) for ep in (1, 2, 4, 8) for etp in (1, 2) if ranks % (ep * etp) == 0])
    found: list[tuple[Any, ...]] = [("--expert-tensor-parallel-size", etp)]
    if ep > 1:
        found.append(("--expert-model-parallel-size", ep))
    is_cut = any(flag[0] == "--tensor-model-parallel-size" for flag in layout)
    if is_cut and ("--sequence-parallel",) not in layout:
        found.append(("--sequence-parallel",))
    return (*layout, *words(found))


def draw_layout(rng: random.Random, worlds: Sequence[int]) -> tuple[int, Flags]:
    """(world, flags): that many processes, cut along the axes at random."""
    world = rng.choice(worlds)
    sizes = [1, 2, 4]
    tp, pp, cp = rng.choice([cut for cut in itertools.product(sizes, sizes, sizes) if world % math.prod(cut) == 0])
    found: list[tuple[Any, ...]] = []
    if tp > 1:
        found.append(("--tensor-model-parallel-size", tp))
        found += some(rng, 0.5, ("--sequence-parallel",))
        found += some(rng, 0.25, ("--tp-comm-overlap",))
    if pp > 1:
        found.append(("--pipeline-model-parallel-size", pp))
        schedule = rng.choice(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
        found.append(("--pipeline-schedule", schedule))
        if schedule == "interleaved":
            found.append(("--num-virtual-stages-per-pipeline-rank", 2))
        found += some(
            rng,
            0.15,
            ("--account-for-embedding-in-pipeline-split",),
            ("--account-for-loss-in-pipeline-split",),
            ("--no-overlap-p2p-communication",),
        )
        found += some(rng, 0.1, ("--decoder-first-pipeline-num-layers", 1), ("--decoder-last-pipeline-num-layers", 1))
        found += some(rng, 0.1, ("--pipeline-model-parallel-layout", "E|" + "t|" * (2 * pp - 2) + "L"))
    if cp > 1:
        found.append(("--context-parallel-size", cp))
        kind = rng.choice(["p2p", "all_gather", "a2a", *(["a2a+p2p"] if cp == 4 else [])])
        found.append(("--cp-comm-type", kind))
        if kind == "a2a+p2p":
            found.append(("--hierarchical-context-parallel-sizes", 2, 2))
    if world > tp * pp * cp or cp > 1:
        strategy = rng.choice(["no_shard", "optim", "optim_grads", "optim_grads_params", None])
        if strategy:
            found.append(("--data-parallel-sharding-strategy", strategy))
        if strategy is None:
            found += some(rng, 0.5, ("--overlapped-distributed-optimizer",))
        found += some(rng, 0.3, ("--overlap-grad-reduce",), ("--overlap-param-gather",))
        found += some(
            rng, 0.1, ("--grad-reduce-mode", "every-microbatch"), ("--num-distributed-optimizer-instances", 2)
        )
    return world, words(found)


def draw_features(rng: random.Random) -> Flags:
    """Memory features: recompute, activation offload, weights and optimizer states in host memory."""
    recompute = rng.choice(
        [
            [],
            [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", 1)],
            [("--recompute-granularity", "full"), ("--recompute-method", "block"), ("--recompute-num-layers", 1)],
            [("--recompute-granularity", "selective"), ("--recompute-modules", rng.choice(["core_attn", "mlp"]))],
            [("--kaimm-recompute-norm",), ("--kaimm-recompute-mlp-activation-func",)],
        ]
    )
    moved = rng.choice(
        [
            [],
            [("--pipeline-offload-ratio", rng.choice([0.25, 0.5, 1]))],
            [("--cpu-offloading",), ("--cpu-offloading-num-layers", 1)],
            [("--cpu-offloading-weights",), ("--cpu-offloading-num-layers", rng.choice([1, 2]))],
            [("--fine-grained-activation-offloading",), ("--offload-modules", rng.choice(["core_attn", "attn_norm"]))],
        ]
    )
    chunk = ("--optimizer-offload-chunk-size", 1024)
    optimizer = rng.choice(
        [
            [],
            [],
            [("--optimizer-cpu-offload",), ("--optimizer-offload-fraction", rng.choice([0.3, 1.0])), chunk],
            [("--optimizer-cpu-offload",), ("--overlap-cpu-optimizer-d2h-h2d",), chunk],
            [("--offload-optimizer-states",), chunk],
        ]
    )
    precision = some(rng, 0.25, BF16)
    # In bf16 the very losses without the features are expected, and chunks change the order of sums.
    chunks = [] if precision else some(rng, 0.4, ("--cross-entropy-chunk-size", rng.choice([3, 8, 21])))
    if not precision and (
        ("--recompute-modules", "mlp") in recompute or ("--recompute-granularity", "full") in recompute
    ):
        chunks += some(rng, 0.4, ("--mlp-chunk-size", rng.choice([5, 16])))
    return words([*recompute, *moved, *optimizer, *precision, *chunks])


def some(rng: random.Random, share: float, *flags: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Each of these with a chance of `share`."""
    return [flag for flag in flags if rng.random() < share]


def words(flags: Iterable[tuple[Any, ...]]) -> Flags:
    """As typed."""
    return tuple(tuple(str(word) for word in flag) for flag in flags)


def simpler(case: Case) -> Iterable[Case]:
    """Without the second layout, without any one flag that is not needed, in a smaller world."""
    if case.then:
        yield dataclasses.replace(case, then=None)
        for i in range(len(case.then[1])):
            yield dataclasses.replace(case, then=(case.then[0], case.then[1][:i] + case.then[1][i + 1 :]))
        if case.then[0] > 1:
            yield dataclasses.replace(case, then=(case.then[0] // 2, case.then[1]))
    for part in ("features", "layout", "model"):
        flags = getattr(case, part)
        for i in range(len(flags)):
            yield dataclasses.replace(case, **{part: flags[:i] + flags[i + 1 :]})
    if case.world > 1:
        yield dataclasses.replace(case, world=case.world // 2)


def runs_of(case: Case, folder: Path) -> tuple[RunConfig, RunConfig, RunConfig | None]:
    """(the case's run, the one it is compared with, the one that continues it). Raises UserError when it is refused."""
    base = (("--pretrained-checkpoint", str(folder / "base")),) if LORA in case.model else ()
    model, precision = (*case.model, *base), (BF16,) if BF16 in case.features else ()
    save, load = ("--save", str(folder / "save")), ("--load", str(folder / "save"))
    plain_layout = case.layout if precision else ()
    run = configured((*model, *case.layout, *case.features, save, ("--save-interval", "1000")), case.world)
    plain = configured((*model, *plain_layout, *precision), case.world if precision else 1)
    if case.then is None:
        return run, plain, None
    return run, plain, configured((*case.model, *case.then[1], *precision, load), case.then[0])


def configured(flags: Flags, world: int) -> RunConfig:
    """The run of these flags. Raises UserError when the rules refuse it."""
    run = parse([word for flag in (*ALWAYS, *flags) for word in flag], description="")
    check(run, world)
    return run

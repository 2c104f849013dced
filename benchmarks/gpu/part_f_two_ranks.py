"""Part F: two ranks on one GPU, under every kind of parallelism, against one rank.

NCCL refuses two ranks on one GPU unless it takes them for two hosts (NCCL_HOSTID); their messages then go through
sockets, and their kernels take turns. So this checks numbers, order and memory, and no times. On the CPU the ranks use
gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.case import Case, Result, Setting, check
from benchmarks.gpu.pair import Pair
from benchmarks.gpu.part_g_speed import needs
from benchmarks.gpu.runs import DECODER, DECODER_EXPERTS, DECODER_FP8, fp8_flags, losses, start

STEPS = 3
JOB_SECONDS = 3.0  # of a job of both ranks: its groups, its communicators and its steps
PAIR_SECONDS = 90.0  # more than the ranks may take to start and to answer
LIMIT = 1e-5  # of losses in fp32; sums have another order
TP, PP, CP = (f"--{name}-parallel-size 2" for name in ("tensor-model", "pipeline-model", "context"))
STRATEGY = "--data-parallel-sharding-strategy"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
SMALL_BUCKETS = "--ddp-bucket-size 20000"
LAYOUTS = {
    "PP 2, gpipe": f"{PP} --pipeline-schedule gpipe",
    "PP 2, 1f1b": f"{PP} --pipeline-schedule 1f1b",
    "PP 2, 1f1b, no overlap": f"{PP} --pipeline-schedule 1f1b --no-overlap-p2p-communication",
    "PP 2, interleaved": f"{PP} --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
    "PP 2, zb-h1": f"{PP} --pipeline-schedule zb-h1",
    "PP 2, zb-v": f"{PP} --pipeline-schedule zb-v",
    "TP 2": TP,
    "TP 2, sequence parallel": f"{TP} --sequence-parallel",
    "TP 2, sequence parallel, chunks": f"{TP} --sequence-parallel --tp-comm-overlap",
    "TP 2, chunks": f"{TP} --tp-comm-overlap",
    "DP 2": SMALL_BUCKETS,
    "DP 2, overlap": f"{SMALL_BUCKETS} --overlap-grad-reduce",
    "DP 2, ZeRO-1": f"{SMALL_BUCKETS} {STRATEGY} optim",
    "DP 2, ZeRO-1, overlap": f"{SMALL_BUCKETS} {STRATEGY} optim {OVERLAP}",
    "DP 2, ZeRO-2": f"{SMALL_BUCKETS} {STRATEGY} optim_grads",
    "DP 2, ZeRO-2, overlap": f"{SMALL_BUCKETS} {STRATEGY} optim_grads {OVERLAP}",
    "DP 2, ZeRO-3": f"{SMALL_BUCKETS} {STRATEGY} optim_grads_params",
    "DP 2, ZeRO-3, overlap": f"{SMALL_BUCKETS} {STRATEGY} optim_grads_params {OVERLAP}",
    "CP 2, p2p": f"{CP} --cp-comm-type p2p",
    "CP 2, all_gather": f"{CP} --cp-comm-type all_gather",
    "CP 2, a2a": f"{CP} --cp-comm-type a2a",
    "CP 2, a2a+p2p": f"{CP} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1",
}
EP = "--expert-model-parallel-size 2"
EXPERT_LAYOUTS = {
    "EP 2": EP,
    "EP 2, ZeRO-3, overlap": f"{EP} {SMALL_BUCKETS} {STRATEGY} optim_grads_params {OVERLAP}",
    "EP 2, TP 2": f"{EP} {TP} --sequence-parallel --expert-tensor-parallel-size 1",
}
# Sums of another order change the number in FP8 that an element is rounded to, here and there.
FP8_LIMIT = 3e-3
FP8_LAYOUTS = {
    f"{name}, fp8 {recipe}": f"{flags} --bf16 {fp8_flags(recipe)}"
    for name, flags, recipe in (
        ("TP 2, sequence parallel", f"{TP} --sequence-parallel", "blockwise"),
        ("TP 2", TP, "tensorwise"),
        ("PP 2, zb-h1", f"{PP} --pipeline-schedule zb-h1", "delayed"),
        ("DP 2, ZeRO-3, overlap", f"{SMALL_BUCKETS} {STRATEGY} optim_grads_params {OVERLAP}", "delayed"),
    )
}
GATHERS, GATHERED_BYTES = 50, 1 << 22


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part. They share two processes, which are started again after a failure."""
    pair = Pair(setting)

    @functools.cache
    def expected(flags: str) -> list[float]:
        return losses(flags, STEPS, setting, start(setting))

    def fp8(flags: str) -> Result:
        needs(setting, flags)
        alone = " ".join(flags.split()[flags.split().index("--bf16") :])
        return compare(pair, DECODER_FP8, flags, expected(f"{DECODER_FP8} {alone}"), FP8_LIMIT)

    def plain(model: str, flags: str) -> Result:
        return compare(pair, model, flags, expected(model), LIMIT)

    def case(name: str, run: Callable[[], Result]) -> Case:
        return Case(name, run, JOB_SECONDS, limit=PAIR_SECONDS)

    return [
        *(case(name, functools.partial(plain, DECODER, flags)) for name, flags in LAYOUTS.items()),
        *(case(name, functools.partial(plain, DECODER_EXPERTS, flags)) for name, flags in EXPERT_LAYOUTS.items()),
        *(case(name, functools.partial(fp8, flags)) for name, flags in FP8_LAYOUTS.items()),
        case("DP 2, buckets leave during backward", functools.partial(buckets_leave, pair)),
        case("memory after gathers", functools.partial(memory_after_gathers, pair)),
        case("contexts", functools.partial(contexts, setting, pair)),
    ]


def compare(pair: Pair, model: str, flags: str, reference: list[float], limit: float) -> Result:
    """Checks the losses of two ranks against those of one."""
    found = pair.ask({"work": "train", "flags": f"{model} {flags}", "steps": STEPS})
    ours = [answer["losses"] for answer in found]
    check(ours[0] == ours[1], f"the ranks report different losses: {ours[0]} and {ours[1]}")
    off = max(abs(a - b) / abs(b) for a, b in zip(ours[0], reference, strict=True))
    check(off <= limit, f"losses {ours[0]} and not {reference}: off by {off:.1e}, and {limit:.0e} is the limit")
    return Result(f"{STEPS} losses within {off:.0e} of one rank", {"difference": off, "losses": ours[0]})


def buckets_leave(pair: Pair) -> Result:
    """Checks that reductions begin before the last gradient is there with overlap, and none without."""
    counts = [
        pair.ask({"work": "overlap", "flags": f"{DECODER} {SMALL_BUCKETS} {flags}"})[0]
        for flags in ("", "--overlap-grad-reduce")
    ]
    said = ", ".join(f"{count['early']} of {count['all']}" for count in counts)
    check(
        counts[0]["early"] == 0 < counts[1]["early"], f"reductions before the last gradient, without and with: {said}"
    )
    return Result(f"reductions before the last gradient, without and with overlap: {said}", {"counts": counts})


def memory_after_gathers(pair: Pair) -> Result:
    """Checks that the results of collectives are freed when their user drops them."""
    found = pair.ask({"work": "gathers", "count": GATHERS, "nbytes": GATHERED_BYTES})
    held = max(answer["held"] for answer in found)
    said = f"{held / 2**20:.1f} MiB held after {GATHERS} gathers of {GATHERED_BYTES >> 20} MiB"
    check(held <= 2 * GATHERED_BYTES, said)
    return Result(said, {"held": held})


def contexts(setting: Setting, pair: Pair) -> Result:
    """Counts the GPUs that each rank has a context on, while it trains: one."""
    setting.needs_cuda("counting contexts")
    found = pair.ask({"work": "contexts", "flags": DECODER + f" {SMALL_BUCKETS}", "steps": STEPS})
    values: dict[str, Any] = {"gpus_per_rank": [answer["gpus"] for answer in found]}
    check(all(gpus <= 1 for gpus in values["gpus_per_rank"]), f"contexts per rank: {values['gpus_per_rank']}")
    values["used_mib"] = found[0]["used_mib"]
    seen = "nvidia-smi lists no processes here" if not any(values["gpus_per_rank"]) else "one GPU per rank"
    return Result(f"{seen}; {values['used_mib']} MiB in use on GPU 0 by two ranks and this process", values)

"""Compares runs with those of another version, bit for bit: losses, gradient norms and checkpoint bytes.

A grid of short runs covers every parallel axis, schedule, sharding strategy, recompute, offload and precision mode.
Each is started from its command line alone, so the two versions may be organised differently. By hand:

  git worktree add ../before COMMIT
  python -m tests.same_numbers record ../before before.json --keep ../before-checkpoints
  python -m tests.same_numbers compare . before.json --continue ../before-checkpoints

`--continue` also resumes every run from the other version's checkpoint and compares its end.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import runpy
import shutil
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

STEPS, SAVED_AT = 4, 2
LINE = re.compile(r"iteration\s+(\d+)/.*?lm loss: (\S+).*?grad norm: (\S+)")

MODEL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 8 --num-workers 0 "
    "--device cpu --eval-iters 0 --log-interval 1 --lr 1e-3 --no-progress-bar --num-layers 4 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 8 --ddp-bucket-size 3000 "
    "--hidden-dropout 0 --attention-dropout 0 "
)
LLAMA = MODEL + (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights --ffn-hidden-size 48 "
)
GPT = MODEL + "--max-position-embeddings 32 "
EXPERTS = LLAMA + "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0.01 "
BIASED = EXPERTS + (
    "--moe-router-score-function sigmoid --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 --moe-shared-expert-intermediate-size 24 "
)
PP = "--pipeline-model-parallel-size 2 --pipeline-schedule "
TP = "--tensor-model-parallel-size 2 "
DELAYED = "--bf16 --fp8-format hybrid --fp8-amax-history-len 3 --fp8-amax-compute-algo max "
BLOCKWISE = "--bf16 --fp8-format e4m3 --fp8-recipe blockwise "
EP = "--expert-model-parallel-size 2 "
CP = "--context-parallel-size 2 --cp-comm-type "
OVERLAP = "--overlap-grad-reduce --overlap-param-gather "
SELECTIVE = "--recompute-granularity selective --recompute-modules "

# name -> (processes, command line)
CASES: dict[str, tuple[int, str]] = {
    "llama": (1, LLAMA),
    "gpt": (1, GPT),
    "gpt dropout": (1, GPT.replace("dropout 0", "dropout 0.1")),
    "squared relu, xavier, 1p": (1, GPT + "--squared-relu --init-method-xavier-uniform --apply-layernorm-1p"),
    "qk norm, window, yarn": (1, LLAMA + "--qk-layernorm --window-size 7,0 --window-attn-skip-freq 2 "
                              "--position-embedding-type yarn --rotary-percent 0.5 --add-qkv-bias"),
    "lora": (1, LLAMA + "--lora-rank 4 --lora-dropout 0.1"),
    "bf16": (1, LLAMA + "--bf16"),
    "fp16": (1, LLAMA + "--fp16 --initial-loss-scale 1024"),
    # Two steps are skipped: the scale is halved until gradients fit.
    "fp16 overflow": (2, LLAMA + f"--fp16 --initial-loss-scale {2**24} --hysteresis 1 --use-distributed-optimizer "
                      + OVERLAP),
    "experts": (2, LLAMA + "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --bf16 "
                "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-ffn-hidden-size 24"),
    "bf16 residual fp32": (1, GPT + "--bf16 --fp32-residual-connection --hidden-dropout 0.1"),
    "sgd": (1, LLAMA + "--optimizer sgd --no-gradient-accumulation-fusion"),
    "precision-aware": (1, LLAMA + "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16"),
    "full uniform": (1, LLAMA + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"),
    "full block": (1, GPT + "--recompute-granularity full --recompute-method block --recompute-num-layers 2"),
    "selective": (1, GPT.replace("dropout 0", "dropout 0.1") + SELECTIVE + "core_attn"),
    "mlp again": (1, LLAMA + SELECTIVE + "mlp --kaimm-recompute-norm"),
    "gemm-last": (1, LLAMA + "--kaimm-recompute-norm --kaimm-recompute-mlp-activation-func"),
    "gemm-last lora": (1, LLAMA + "--lora-rank 4 --kaimm-recompute-norm --kaimm-recompute-mlp-activation-func"),
    "balanced": (1, LLAMA + "--recompute-policy balanced --activation-memory-budget 0.5"),
    "cpu offload": (1, LLAMA + "--cpu-offloading --cpu-offloading-num-layers 2"),
    "fine offload": (1, GPT + "--fine-grained-activation-offloading --offload-modules qkv_linear mlp_act"),
    "optimizer chunks": (1, LLAMA + "--bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5 "
                         "--optimizer-offload-chunk-size 1024 --overlap-cpu-optimizer-d2h-h2d"),
    "optimizer auto": (1, LLAMA + "--optimizer-cpu-offload --optimizer-offload-policy auto "
                       "--optimizer-offload-chunk-size 1024"),
    "dp no_shard": (2, LLAMA + "--data-parallel-sharding-strategy no_shard"),
    "dp optim bf16": (2, LLAMA + "--bf16 --use-distributed-optimizer " + OVERLAP),
    "dp optim_grads": (2, LLAMA + "--data-parallel-sharding-strategy optim_grads " + OVERLAP),
    "dp optim_grads_params": (2, LLAMA + "--data-parallel-sharding-strategy optim_grads_params --bf16 " + OVERLAP),
    "dp overlapped": (2, GPT + "--overlapped-distributed-optimizer --reduce-bucket-size 4000"),
    "dp every-microbatch, reduce in bf16": (2, LLAMA + "--bf16 --grad-reduce-mode every-microbatch "
                                            "--use-distributed-optimizer --grad-reduce-in-bf16 " + OVERLAP),
    "dp instances": (4, LLAMA + "--use-distributed-optimizer --num-distributed-optimizer-instances 2 " + OVERLAP),
    "dp weights offloaded": (2, LLAMA + "--use-distributed-optimizer --cpu-offloading-weights "
                             "--cpu-offloading-num-layers 2 --bf16"),
    "dp weights and updates offloaded": (2, LLAMA + "--data-parallel-sharding-strategy optim_grads_params --bf16 "
                                         "--cpu-offloading-weights --cpu-offloading-num-layers 2 "
                                         "--optimizer-cpu-offload --optimizer-offload-chunk-size 1024 "
                                         "--overlap-cpu-optimizer-d2h-h2d"),
    "dp states offloaded": (2, LLAMA + "--use-distributed-optimizer --offload-optimizer-states"),
    "tp": (2, GPT + TP),
    "tp sp": (2, LLAMA + TP + "--sequence-parallel"),
    "tp sp overlap": (2, LLAMA + TP + "--sequence-parallel --tp-comm-overlap"),
    "tp shared heads": (4, LLAMA + "--tensor-model-parallel-size 4 --sequence-parallel --add-qkv-bias"),
    "tp sp dropout gemm-last": (2, GPT.replace("dropout 0", "dropout 0.1") + TP + "--sequence-parallel "
                                "--kaimm-recompute-norm --kaimm-recompute-mlp-activation-func"),
    "tp sp optimizer chunks": (2, GPT + TP + "--sequence-parallel --overlapped-distributed-optimizer "
                               "--grad-reduce-mode last-microbatch --optimizer-cpu-offload "
                               "--optimizer-offload-chunk-size 1024 --overlap-cpu-optimizer-d2h-h2d"),
    "tp sp lora": (2, LLAMA + TP + "--sequence-parallel --lora-rank 4 --kaimm-recompute-norm"),
    "pp gpipe": (2, GPT + PP + "gpipe"),
    "pp 1f1b": (2, LLAMA + PP + "1f1b"),
    "pp interleaved": (2, LLAMA + PP + "interleaved --num-virtual-stages-per-pipeline-rank 2"),
    "pp zb-h1": (2, GPT + PP + "zb-h1"),
    "pp zb-v": (2, LLAMA + PP + "zb-v --bf16"),
    "pp offload": (2, LLAMA + PP + "interleaved --num-virtual-stages-per-pipeline-rank 2 --pipeline-offload-ratio 0.5"),
    "pp dp": (4, LLAMA + PP + "1f1b --use-distributed-optimizer " + OVERLAP),
    "cp p2p": (2, LLAMA + CP + "p2p"),
    "cp all_gather": (2, LLAMA + CP + "all_gather --window-size 9,0"),
    "cp a2a": (2, GPT + CP + "a2a --attention-dropout 0.1 --bf16"),
    "cp a2a+p2p": (4, LLAMA + "--context-parallel-size 4 --cp-comm-type a2a+p2p "
                   "--hierarchical-context-parallel-sizes 2 2"),
    "cp core_attn again": (2, LLAMA + CP + "p2p " + SELECTIVE + "core_attn"),
    "tp pp cp": (8, LLAMA + TP + PP + "1f1b " + CP + "p2p --sequence-parallel --use-distributed-optimizer"),
    "fp8 tensorwise": (1, GPT + "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --no-fp8-wgrad"),
    "fp8 mxfp8": (1, GPT + "--fp8-format hybrid --fp8-recipe mxfp8"),
    "fp8 lora": (1, GPT + DELAYED + "--lora-rank 4 --kaimm-recompute-norm"),
    "fp8 full uniform": (1, GPT + DELAYED + "--recompute-granularity full --recompute-method uniform "
                         "--recompute-num-layers 2"),
    "fp8 gemm-last": (1, GPT + BLOCKWISE + "--kaimm-recompute-norm --kaimm-recompute-mlp-activation-func"),
    "fp8 cpu offload": (1, GPT + DELAYED + "--cpu-offloading --cpu-offloading-num-layers 2"),
    "fp8 fine offload": (1, GPT + BLOCKWISE + "--fine-grained-activation-offloading --offload-modules qkv_linear mlp_act"),
    "fp8 optimizer chunks": (1, GPT + DELAYED + "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 "
                             "--optimizer-offload-chunk-size 1024 --overlap-cpu-optimizer-d2h-h2d"),
    "fp8 dp optim_grads_params": (2, GPT + BLOCKWISE + "--data-parallel-sharding-strategy optim_grads_params " + OVERLAP),
    "fp8 dp weights offloaded": (2, GPT + DELAYED + "--use-distributed-optimizer --cpu-offloading-weights "
                                 "--cpu-offloading-num-layers 2"),
    "fp8 tp sp overlap": (2, GPT + DELAYED + TP + "--sequence-parallel --tp-comm-overlap "
                          "--kaimm-recompute-mlp-activation-func"),
    "fp8 pp zb-h1": (2, GPT + DELAYED + PP + "zb-h1 --first-last-layers-bf16"),
    "fp8 pp zb-v": (2, GPT + BLOCKWISE + PP + "zb-v"),
    "fp8 cp p2p": (2, GPT + BLOCKWISE + CP + "p2p"),
    "fp8 experts": (2, EXPERTS + EP + DELAYED + "--moe-layer-freq 2 --moe-shared-expert-intermediate-size 16"),
    "dp experts": (4, EXPERTS + EP + "--use-distributed-optimizer " + OVERLAP),
    "tp sp experts": (2, EXPERTS + TP + EP + "--sequence-parallel --expert-tensor-parallel-size 1 " + SELECTIVE + "moe"),
    "pp experts, bias": (4, BIASED + EP + PP + "zb-h1 --bf16 --use-distributed-optimizer"),
}  # fmt: skip


def run(tree: Path, name: str, save: Path, load: Path | None = None) -> dict[str, Any]:
    """Runs one case of `tree`: {"log": a line per iteration, "files": name -> digest of its last checkpoint}, or its
    error.
    """
    world, line = CASES[name]
    argv = [*line.split(), "--train-iters", str(STEPS), "--save", str(save), "--save-interval", str(SAVED_AT)]
    if load is not None:
        argv += ["--load", str(load), "--ckpt-step", str(SAVED_AT)]
    elif "--lora-rank" in argv:
        trained = save.with_name("trained")
        run(tree, "llama" if line.startswith(LLAMA) else "gpt", trained)
        argv += ["--pretrained-checkpoint", str(trained)]
    with tempfile.TemporaryDirectory() as logs:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [_start(tree, argv, rank, world, port, Path(logs)) for rank in range(world)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        texts = [path.read_text(errors="replace") for path in sorted(Path(logs).iterdir())]
    if any(codes):
        return {"error": "\n".join(text[-1500:] for text in texts)}
    log = [" ".join(found.groups()) for text in texts for found in LINE.finditer(text)]
    return {"log": log, "files": digests(save)}


def _start(tree: Path, argv: list[str], rank: int, world: int, port: int, logs: Path) -> int:
    """Forks a rank, so that torch is imported only once, by this process."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        log = os.open(logs / f"{rank:02d}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        os.chdir(tree)
        sys.path[:] = [str(tree), *(p for p in sys.path if not (Path(p or ".") / "megatron").is_dir())]
        sys.argv = ["pretrain_gpt.py", *argv]
        runpy.run_path("pretrain_gpt.py", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def digests(folder: Path) -> dict[str, str]:
    """Returns the digests of the files with tensors in the last checkpoint."""
    last = max((path for path in folder.iterdir() if path.name.startswith("iter_")), key=lambda path: path.name)
    files = sorted(path for path in last.rglob("*.safetensors"))
    assert files, f"{last} holds no tensors"
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def measure(tree: Path, names: list[str], keep: Path | None, before: Path | None = None) -> dict[str, Any]:
    """Returns name -> results, and with `before` (another version's checkpoints) "NAME, continued" -> results."""
    found: dict[str, Any] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            start = time.monotonic()
            found[name] = run(tree, name, Path(scratch) / "fresh")
            if before is not None:
                found[f"{name}, continued"] = run(tree, name, Path(scratch) / "continued", before / name)
            if keep is not None and "error" not in found[name]:
                shutil.copytree(Path(scratch) / "fresh", keep / name)
            print(f"{time.monotonic() - start:5.1f} s  {name}", found[name].get("error", ""), flush=True)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns the differences, one line per run. A continued run has the last iterations of the complete one."""
    found = []
    for name, result in after.items():
        expected = before[name.removesuffix(", continued")]
        log = expected.get("log", ())
        if name.endswith(", continued"):
            log = [line for line in log if int(line.split()[0]) > SAVED_AT]
        if "error" in result or "error" in expected:
            found.append(f"{name}: failed")
        elif result["log"] != list(log):
            found.append(f"{name}: {list(log)} before, {result['log']} now")
        elif result["files"] != expected["files"]:
            found.append(f"{name}: losses agree, and the checkpoint has other bytes")
    return found


def main() -> int:
    """Runs the program; see the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("tree", type=Path, help="a checkout of the project")
    parser.add_argument("numbers", type=Path, help="the file that record writes and compare reads")
    parser.add_argument("--keep", type=Path, help="record: keep the checkpoints here")
    parser.add_argument("--continue", dest="before", type=Path, help="compare: resume from the checkpoints kept here")
    parser.add_argument("-k", dest="only", default="", help="only the runs whose name contains this")
    args = parser.parse_args()
    importlib.import_module("numpy")  # imported before the fork, once for all ranks
    importlib.import_module("torch")

    names = [name for name in CASES if args.only in name]
    found = measure(args.tree.resolve(), names, args.keep, args.before and args.before.resolve())
    if args.what == "record":
        args.numbers.write_text(json.dumps(found, indent=1))
        return int(any("error" in result for result in found.values()))
    faults = differences(json.loads(args.numbers.read_text()), found)
    print("\n".join(faults) or f"{len(found)} runs, all the same")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())

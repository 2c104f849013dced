"""Runs that begin in Megatron-LM and go on here, and the other way: the same losses, from the same samples.

By hand: `python -m tests.megatron.continue_runs --megatron DIR --python BIN [--work DIR] [--forms NAME ...]`, with
Megatron-LM's sources and an interpreter that has what they import (see on_cpu.py). A small model in fp32 of Llama's
kind, one with experts, and ones like DeepSeek-V3 and -V2-Lite (latent attention, experts, predictions of further
tokens) train 20 steps straight and 10 steps until they are saved, there on four ranks; every form of the checkpoint is
gone on with here for 10 steps, under another layout, too, and its weights, read and written here, must be its own bits
under its own names. Then it trains here, is written in both formats, and goes on there with strict loading. All losses
of steps 11 to 20 must agree to one unit of the sixth digit, and the samples that Megatron-LM read must be those that
--data-order megatron reads here. Takes some five minutes a model on two cores. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.command_line.entry import run_of
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.indexed import IndexedDatasetWriter
from megatron.core.datasets.sample import Splits
from megatron.core.dist_checkpointing.pickles import load_objects
from megatron.training.logging.line import parse_line

ROOT = Path(__file__).parents[2]
STEPS, SAVED, BATCH, VOCAB = 20, 10, 8, 128
TOLERANCE = 2e-6  # relative; losses are printed with seven digits, and one of theirs is worked out from two
MODEL = shlex.split("""--num-layers 4 --hidden-size 64 --num-attention-heads 4
--swiglu --ffn-hidden-size 128 --normalization RMSNorm --position-embedding-type rope --seq-length 32
--max-position-embeddings 32 --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --make-vocab-size-divisible-by 32 --tokenizer-type NullTokenizer --init-method-std 0.05""")
TRAINING = shlex.split(f"""--micro-batch-size 2 --global-batch-size {BATCH} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
--lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --train-iters {STEPS} --eval-iters 0
--log-interval 1 --split 90,5,5 --seed 1234""")
ON_CPU = shlex.split("""--transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-persist-layer-norm
--no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion
--no-rope-fusion --no-create-attention-mask-in-dataloader --dist-ckpt-strictness raise_unexpected
--eval-interval 1000""")
CUT = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
TARGET = ["--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"]
GROUPED = shlex.split("--group-query-attention --num-query-groups 2")
LATENTS = shlex.split(
    """--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 24"""
)
STRETCHED = shlex.split("--q-lora-rank 48 --qk-layernorm --rotary-scaling-factor 4 --mscale 0.8 --mscale-all-dim 0.6")
# Four experts of which each token takes two, of the better of two groups, with biases and a loss of whole samples.
EXPERTS = shlex.split("""--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-layer-freq [0,1,1,1]
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 2 --moe-router-group-topk 1
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --moe-router-dtype fp32
--moe-token-dispatcher-type allgather --moe-shared-expert-intermediate-size 64""")
# Its plain norm takes no sequence parallelism, without which experts go with no tensor parallelism.
EXPERTS_CUT = ["--expert-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
EXPERTS_TARGET = ["--target-expert-parallel-size", "2", "--target-pipeline-parallel-size", "2"]
SHARED = "--use-distributed-optimizer"
FORMS = {
    "torch_dist": [SHARED, "--ckpt-format", "torch_dist"],
    "torch_dist reshardable": [SHARED, "--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable"],
    "torch_dist replicated": ["--ckpt-format", "torch_dist"],
    "torch": [SHARED, "--ckpt-format", "torch"],
    "torch replicated": ["--ckpt-format", "torch"],
}
# Forms in which the optimizer of experts is read here.
OF_EXPERTS = ["torch_dist", "torch_dist reshardable", "torch replicated"]
OURS = [sys.executable]
Losses = dict[int, float]


@dataclass(frozen=True)
class Model:
    """The flags of a model, of its layout on four ranks, and of convert.py for that; the steps that are compared."""

    flags: list[str]
    cut: list[str]
    target: list[str]
    compared: int = STEPS - SAVED

    @property
    def experts(self) -> bool:
        """Whether the model has experts."""
        return "--num-experts" in self.flags


_PREDICTING = [*LATENTS, *STRETCHED, "--mtp-num-layers"]
MODELS = {
    "dense": Model(GROUPED, CUT, TARGET),
    "experts": Model(GROUPED + EXPERTS, EXPERTS_CUT, EXPERTS_TARGET),
    "latents": Model([*_PREDICTING, "1"], CUT[2:], TARGET[2:]),
    # Under tp its own layers lose the gradient that the rotated channels of keys get from the heads of other ranks.
    "latents under tp": Model([*_PREDICTING, "1"], CUT, TARGET, compared=1),
    "like V3": Model([*_PREDICTING, "2", *EXPERTS], EXPERTS_CUT, EXPERTS_TARGET),
    # Without norms of latents, which need Transformer Engine where queries are not projected from one.
    "like V2-Lite": Model([*LATENTS, *EXPERTS, "--rope-type", "rope"], EXPERTS_CUT, EXPERTS_TARGET),
}


@dataclass(frozen=True)
class Programs:
    """Both of them, where they write, and the model."""

    megatron: Path
    python: Path
    work: Path
    model: Model

    def data(self) -> list[str]:
        """The flag of a dataset of documents with a pattern, which is made once."""
        prefix = self.work / "walks"
        if not prefix.with_suffix(".idx").exists():
            random = np.random.RandomState(7)
            with IndexedDatasetWriter(str(prefix), "uint16") as writer:
                for _ in range(300):
                    walk = random.randint(0, VOCAB) + random.randint(1, 6) * np.arange(random.randint(3, 200))
                    writer.add_document([*(walk % (VOCAB - 2)).tolist(), VOCAB - 1])
                writer.finalize()
        return ["--data-path", str(prefix)]

    def there(self, name: str, *flags: str) -> Losses:
        """Run Megatron-LM on 4 ranks. The second line of each of its runs is the mean of the first two losses."""
        script = [str(ROOT / "tests/megatron/on_cpu.py"), str(self.megatron), "4", "pretrain_gpt.py"]
        words = [
            *MODEL,
            *self.model.flags,
            *TRAINING,
            *ON_CPU,
            *self.model.cut,
            "--vocab-size",
            str(VOCAB),
            "--save-interval",
            str(SAVED),
        ]
        words += ["--data-cache-path", str(self.work / "cache"), *self.data(), *flags]
        # It compiles its helpers with the python3 that it finds.
        paths = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        samples = str(self.work / f"{name}.samples")
        for old in self.work.glob(f"{name}.samples.*"):
            old.unlink()
        printed = self._run(name, [str(self.python), *script, *words], PYTHONPATH="", PATH=paths, SAMPLES=samples)
        first, second = sorted(printed)[:2]
        return printed | {second: 2 * printed[second] - printed[first]}

    def here(self, name: str, *flags: str, ranks: int = 1) -> Losses:
        """Run our program."""
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        return self._run(name, [*OURS, *launch, str(ROOT / "pretrain_gpt.py"), *self.our_flags(), *flags])

    def our_flags(self) -> list[str]:
        """Those of every run of ours."""
        return [
            *MODEL,
            *self.model.flags,
            *TRAINING,
            "--vocab-size",
            str(VOCAB),
            "--data-order",
            "megatron",
            *self.data(),
        ]

    def convert(self, name: str, *flags: str, loader: str = "megatron") -> Path:
        """Write a checkpoint for Megatron-LM."""
        out = self.work / name
        script = [str(ROOT / "tools/checkpoint/convert.py"), "--loader", loader, "--saver", "mcore"]
        words = ["--saver-transformer-impl", "local", "--save-dir", str(out), *flags]
        self._run(f"{name}_convert", [*OURS, *script, *words])
        return out

    def _run(self, name: str, command: list[str], **environment: str) -> Losses:
        log = self.work / f"{name.replace(' ', '_')}.log"
        with open(log, "w", encoding="utf-8") as file:
            changes = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
            done = subprocess.run(
                command, cwd=self.work, stdout=file, stderr=subprocess.STDOUT, env=os.environ | changes
            )
        if done.returncode:
            raise SystemExit(f"{name} ended with exit code {done.returncode}; see {log}")
        lines = filter(None, map(parse_line, log.read_text(encoding="utf-8", errors="replace").splitlines()))
        return {int(line["iteration"]): float(line["lm loss"]) for line in lines}


def differs(name: str, expected: Losses, found: Losses, compared: int) -> bool:
    """Print one line about the losses of the `compared` steps after the save."""
    steps = range(SAVED + 1, SAVED + compared + 1)
    missing = [step for step in steps if step not in found]
    most = max((abs(found[step] / expected[step] - 1) for step in steps if step in found), default=0.0)
    wrong = bool(missing) or most > TOLERANCE
    says = f"steps {missing} are missing" if missing else f"largest relative difference {most:.1e}"
    print(f"{'DIFFERS' if wrong else 'same   '}  {name}: {says}", flush=True)
    return wrong


def samples_differ(programs: Programs, name: str) -> bool:
    """Whether Megatron-LM read other tokens under the numbers that follow the save than our datasets have there."""
    run = run_of(programs.our_flags(), "")
    dataset = build_datasets(run.data, Splits(STEPS * BATCH, None, None), run.train.seed, VOCAB).train
    assert dataset is not None
    read = {}
    for file in programs.work.glob(f"{name}.samples.*"):
        for line in file.read_text(encoding="ascii").splitlines():
            number, *tokens = map(int, line.split())
            read[number] = tokens
    wrong = [
        number
        for number in range(SAVED * BATCH, STEPS * BATCH)
        if read.get(number) != [int(token) for token in np.asarray(dataset[number])[:-1]]
    ]
    print(
        f"{'DIFFERS' if wrong else 'same   '}  samples of {name}: {f'numbers {wrong[:8]}' if wrong else 'all'}",
        flush=True,
    )
    return bool(wrong)


def bits_differ(programs: Programs, form: str, saved: Path) -> bool:
    """Whether weights that are read here and written again have other names, shapes or bits than Megatron-LM's."""
    classic = "torch_dist" not in form
    flags = ["--format", "torch", *programs.model.target] if classic else ["--format", "torch_dist"]
    written = programs.convert(f"again {form}", "--load-dir", str(saved), *flags, loader="mcore") / "release"
    weights = classic_weights if classic else dist_weights
    theirs, ours = weights(saved / f"iter_{SAVED:07d}"), weights(written)
    wrong = sorted(theirs.keys() ^ ours.keys())
    wrong += [name for name, tensor in theirs.items() if name in ours and not torch.equal(tensor, ours[name])]
    if list(theirs) != list(ours) and not wrong:
        wrong.append("their order")
    print(f"{'DIFFERS' if wrong else 'same   '}  bits of {len(theirs)} tensors in {form}: {wrong[:4]}", flush=True)
    return bool(wrong)


def classic_weights(folder: Path) -> dict[str, torch.Tensor]:
    """File and name -> weight of the classic layout."""
    files = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
    models = {file.parent.name: load_objects(file, str(file))["model"] for file in files}
    return {
        f"{rank}/{name}": tensor
        for rank, model in models.items()
        for name, tensor in model.items()
        if isinstance(tensor, torch.Tensor)
    }


def dist_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Name -> weight of torch_dist, and an empty tensor for the name of each object of a module."""
    reader = dcp.FileSystemReader(folder)
    entries = sorted(reader.read_metadata().state_dict_metadata.items())
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries
        if isinstance(entry, TensorStorageMetadata) and not name.startswith(("optimizer", "chained"))
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors | {name: torch.empty(0) for name, _ in entries if "._extra_state" in name}


def from_there(programs: Programs, forms: list[str]) -> int:
    """How many comparisons differ."""
    straight, compared = programs.there("straight", SHARED), programs.model.compared
    wrong = int(samples_differ(programs, "straight"))
    for form in forms:
        saved = programs.work / f"there {form}"
        programs.there(f"save {form}", *FORMS[form], "--save", str(saved), "--exit-interval", str(SAVED))
        there = programs.there(f"there from {form}", *FORMS[form], "--load", str(saved))
        wrong += differs(f"there from {form}", straight, there, compared)
        losses = programs.here(f"here from {form}", "--load", str(saved))
        wrong += differs(f"here from {form}", straight, losses, compared)
        wrong += bits_differ(programs, form, saved)
    cut = programs.here("here cut", "--load", str(saved), *programs.model.cut, ranks=4)
    return wrong + differs(f"here from {form} under its layout", straight, cut, compared)


def from_here(programs: Programs) -> int:
    """How many comparisons differ."""
    saved = programs.work / "here"
    straight = programs.here("straight here", "--save", str(saved), "--save-interval", str(SAVED))
    source = ["--load-dir", str(saved), "--ckpt-step", str(SAVED)]
    ways = {
        "torch_dist": (
            "torch_dist reshardable",
            EXPERTS_TARGET[:2] * programs.model.experts,
            ["--dist-ckpt-strictness", "raise_all"],
        ),
        "torch": ("torch replicated", programs.model.target, ["--no-load-rng"]),
    }
    wrong = 0
    for name, (form, cut, strict) in ways.items():
        written = programs.convert(f"for_megatron_{name}", *source, "--format", name, *cut)
        found = programs.there(f"there from ours {name}", *FORMS[form], "--load", str(written), *strict)
        wrong += differs(f"there from ours, {name}", straight, found, programs.model.compared)
        wrong += samples_differ(programs, f"there from ours {name}")
    return wrong


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="Megatron-LM's source folder")
    parser.add_argument("--python", type=Path, required=True, metavar="BIN", help="the interpreter that runs it")
    parser.add_argument("--work", type=Path, metavar="DIR", help="kept afterwards; default a temporary folder")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS, metavar="NAME", help=", ".join(FORMS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = (given.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        wrong = 0
        for model in given.models:
            print(f"{model}:", flush=True)
            (work / model).mkdir(exist_ok=True)
            programs = Programs(given.megatron.resolve(), given.python.absolute(), work / model, MODELS[model])
            forms = [form for form in given.forms if not programs.model.experts or form in OF_EXPERTS]
            wrong += from_there(programs, forms) + from_here(programs)
    print(f"{wrong} differ" if wrong else "all are the same")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

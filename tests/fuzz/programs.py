"""Every program of the tree with command lines that work, the files they read, and files that nobody should accept.

Words name files as `{hf}` or `{out}`: `files` says where each is for one case. Only the tests' folder is written to.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import resource
import runpy
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import uvicorn

import tools.checkpoint.align
import tools.checkpoint.convert
import tools.evaluate
import tools.generate
import tools.merge_datasets
import tools.plan
import tools.preprocess_data
import tools.preprocess_sft
import tools.profile_machine
import tools.quickstart
import tools.run_text_generation_server  # noqa: F401, all of them: what is imported here need not be in each process
from megatron.command_line.flag_parser import FlagParser
from megatron.tooling import layout_parity, layouts
from megatron.tooling.plan import try_runs
from tests.e2e.helpers import launch
from tests.e2e.helpers.runs import MOCK, flags, write_dataset
from tests.fuzz import planner_files
from tests.unit.datasets.chat import CHATML, messages, tokenizer_folder
from tests.unit.inference.hf_folder import convert, write_folder
from tests.unit.planner.profiles import RUN as PROFILED

ROOT = Path(__file__).parents[2]
DRIVER = "tests.fuzz.programs:act"
FAULTS = ("folder", "shut", "empty", "other", "dangling")
MEMORY_BYTES, FILE_BYTES, MOST_FORKS = 8 << 30, 1 << 28, 200

_TRAIN = {"--train-iters": 2, "--micro-batch-size": 1, "--global-batch-size": 2}
_SAVE = {"--save": "{out}/save", "--save-interval": 1}
_DATA = {"--data-path": "{data}", "--split": "8,1,1", "--data-cache-path": "{out}/cache", "--eval-iters": 1}
_HF = ("--load-hf", "{hf}", "--device", "cpu")
_OURS = ("--load", "{checkpoint}", "--device", "cpu")
_TOKENIZER = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "{tokenizer}")
_FROM_HF = ("--mock-data", "--load-hf", "{hf}", *flags(_TRAIN)[flags().index("--seq-length") :])
_FEW = (
    "tp=1,2 pp=1 cp=1 virtual_stages=1 schedule=1f1b uneven_ends=off micro_batch=1 instances=1 offload=0 "
    "optimizer_offload=0 sharding=optim tp_overlap=on recompute=none,full"
)
_SEARCH = ("--space", _FEW, "--top", "3", "--json", "{out}/kept.json", *PROFILED)
_ANSWERS = {
    "--perform-rl-step": None, "--prompt-data": "{jsonl}", "--rm-type": "length", "--rollout-max-response-len": 8,
    "--grpo-prompts-per-step": 2, "--grpo-group-size": 2, "--global-batch-size": 4, "--attention-dropout": 0,
    "--hidden-dropout": 0, "--grpo-kl-beta": 0.1, "--rl-generation-batch-size": 2,
}  # fmt: skip

# Program -> command lines that end with 0. The model is tiny and the runs are of one process.
PROGRAMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "pretrain_gpt.py": (
        tuple(flags(MOCK, _TRAIN, _SAVE)),
        tuple(flags(_TRAIN, _DATA)),
        tuple(flags(MOCK, _TRAIN, {"--load": "{run}", "--override-opt-param-scheduler": None, "--train-iters": 3})),
        _FROM_HF,
        tuple(flags(_TRAIN, _DATA, {"--data-cache-path": "{cache}"})),
    ),
    "finetune.py": (
        ("--data-path", "{chat}", "--split", "1,0,0", *flags(_TRAIN, {"--vocab-size": 512})),
    ),
    "tools/generate.py": (
        (*_OURS, "--prompt", "a", "--prompt", "b", "--max-new-tokens", "2"),
        (*_HF, "--prompts-file", "{prompts}", "--max-new-tokens", "2", "--temperature", "0"),
    ),
    "tools/evaluate.py": (
        (*_OURS, "--text", "{text}"),
        (*_HF, "--jsonl", "{jsonl}", "--stride", "8", "--context-length", "16", "--output", "{out}/scores.json"),
    ),
    "tools/run_text_generation_server.py": ((*_HF, "--port", "0", "--max-batch-size", "2"),),
    "tools/plan.py": (
        ("schedule", "--pipeline-model-parallel-size", "2", "--num-microbatches", "4", "--png", "{out}/a.png"),
        ("memory", "--world-size", "2", *flags(MOCK, {"--tensor-model-parallel-size": 2})),
        ("time", "--cluster", "{cluster}", "--world-size", "2", *PROFILED),
        ("time", "--profile", "{profile}", "--world-size", "2", *PROFILED),
        ("search", "--cluster", "{cluster}", "--explain", "1", "--front", "{out}/kept.html", "--train-tokens", "1e9",
         "--compare", "--tensor-model-parallel-size 2 --micro-batch-size 1", *_SEARCH),
        ("search", "--profile", "{profile}", "--world-size", "2", "--try", "1", *_SEARCH),
        ("memory", *flags(_ANSWERS)),
        ("time", "--cluster", "h100:1x1", "--response-lengths", "4", *flags(_ANSWERS)),
    ),
    "benchmarks/planner/predict.py": (("--rows", "{rows}", "--out", "{out}/kept.csv", "--anchor", "factor"),),
    "tools/profile_machine.py": (
        ("--out", "{out}/kept.json", "--seconds", "0.01", "--micro-batch-sizes", "1", *flags(MOCK, _TRAIN)),
    ),
    "tools/layout_parity.py": (("--steps", "1", "--", *flags(MOCK)),),
    "tools/preprocess_data.py": (
        ("--input", "{jsonl}", "--output-prefix", "{out}/made", "--workers", "1", "--append-eod", *_TOKENIZER),
    ),
    "tools/preprocess_sft.py": (
        ("--input", "{conversations}", "--output-prefix", "{out}/made", "--workers", "1", *_TOKENIZER),
    ),
    "tools/merge_datasets.py": (("--input", "{datasets}", "--output-prefix", "{out}/merged"),),
    "tools/checkpoint/align.py": (
        ("--hf", "{hf}", "--length", "8", "--batch", "1", "--device", "cpu"),
        ("--hf", "{hf}", "--load", "{checkpoint}", "--length", "4", "--batch", "1", "--output", "{out}/a.png"),
    ),
    "tools/checkpoint/convert.py": (
        ("--loader", "hf", "--saver", "megatron", "--load-dir", "{hf}", "--save-dir", "{out}/made"),
        ("--loader", "megatron", "--saver", "hf", "--load-dir", "{checkpoint}", "--save-dir", "{out}/made"),
        ("--loader", "megatron", "--saver", "mcore", "--load-dir", "{checkpoint}", "--save-dir", "{out}/made"),
    ),
    "tools/quickstart.py": ((),),
    "examples/llama/pretrain_llama.sh": (
        ("--dry-run", "--preset", "llama-tiny", "--data", "mock", "--train-iters", "2", "--lr", "1e-3"),
    ),
}  # fmt: skip


@functools.cache
def good_files() -> dict[str, str]:
    """Name -> path of what the programs read, and of damaged and unreadable versions of it. Made once, read-only."""
    launch.warm("tests.fuzz.programs")
    root = Path(tempfile.mkdtemp(prefix="fuzz-files-"))
    atexit.register(_remove, root, os.getpid())
    hf, tokenizer, data, chat = root / "hf", root / "tokenizer", root / "sets" / "data", root / "chat"
    write_folder(hf)
    tokenizer_folder(tokenizer, CHATML)
    (root / "sets").mkdir()
    write_dataset(data, 1)
    write_dataset(root / "sets" / "second", 2)
    texts = {
        "text": "The quick brown fox jumps over the lazy dog.",
        "prompts": "a\nb\n",
        "jsonl": json.dumps({"text": "The quick brown fox."}) + "\n" + json.dumps({"text": "jumps"}) + "\n",
        "conversations": json.dumps({"messages": messages("the quick", "brown fox")}) + "\n",
    }
    texts |= {name: planner_files.good(name) for name in planner_files.KINDS}
    for name, text in texts.items():
        (root / name).write_text(text)
    _make(root, "tools/preprocess_sft.py", "--input", root / "conversations", "--output-prefix", chat, "--workers", 1,
          *_TOKENIZER[:-1], tokenizer)  # fmt: skip
    _make(root, "pretrain_gpt.py", *flags(MOCK, _TRAIN, {"--save": root / "run", "--save-interval": 2}))
    cached = {"--data-path": data, "--data-cache-path": root / "cache"}
    _make(root, "pretrain_gpt.py", *flags(_TRAIN, _DATA, cached))
    made = {
        "hf": hf,
        "tokenizer": tokenizer,
        "data": data,
        "datasets": root / "sets",
        "chat": chat,
        "checkpoint": convert(hf, root / "checkpoint"),
        "run": root / "run",
        "cache": root / "cache",
        **{name: root / name for name in texts},
    }
    made |= _damaged(root, {name: Path(path) for name, path in made.items()})
    for folder, _, files in os.walk(root):
        os.chmod(folder, os.stat(folder).st_mode & 0o555)
        for file in files:
            path = os.path.join(folder, file)
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode & 0o444)
    return {name: str(path) for name, path in made.items()}


def _damaged(root: Path, made: dict[str, Path]) -> dict[str, Path]:
    """One file of a good folder replaced by a folder, made unreadable, emptied, or filled with other bytes."""
    found: dict[str, Path] = {}
    parts = {
        "hf": ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"),
        "checkpoint": ("latest_checkpointed_iteration.txt", "iter_0000000", "iter_0000000/metadata.json",
                       "iter_0000000/__0_0.safetensors"),
        "tokenizer": ("tokenizer.json", "tokenizer_config.json"),
        "datasets": ("data.idx", "data.bin"),
    }  # fmt: skip
    for name, files in parts.items():
        for file in files:
            for fault in FAULTS:
                label = f"{name}_{Path(file).name.replace('.', '_')}_{fault}"
                copy = root / label
                shutil.copytree(made[name], copy)
                _spoil(copy / file, fault)
                found[label] = copy
                if name == "datasets":
                    found[f"data_{label}"] = copy / "data"
    for fault in FAULTS:
        copy = shutil.copytree(made["cache"], root / f"cache_{fault}")
        for array in copy.glob("*/*.npy"):
            _spoil(array, fault)
        found[copy.name] = copy
    pickled = shutil.copytree(made["hf"], root / "hf_pickled")
    (pickled / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, pickled / "pytorch_model.bin")
    found[pickled.name] = pickled
    return found


def _spoil(path: Path, fault: str) -> None:
    assert path.exists(), path
    if fault == "shut":
        path.chmod(0)
        return
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if fault == "folder":
        path.mkdir()
    elif fault == "dangling":
        path.symlink_to(path.with_name("gone"))
    else:
        path.write_bytes(b"" if fault == "empty" else b"\x80\x04}q\x00(\xff" * 40)


def bad_files(folder: Path) -> dict[str, str]:
    """Name -> path of things in a case's own folder that are no file to read and no place to write."""
    bad = folder / "bad"
    bad.mkdir()
    (bad / "file").write_bytes(b"\x00\xff not UTF-8\n")
    (bad / "folder").mkdir()
    (bad / "dangling").symlink_to("gone")
    (bad / "loop").symlink_to("loop")
    for name in ("shut", "shut_folder"):
        path = bad / name
        path.mkdir() if "folder" in name else path.touch()
        path.chmod(0)
    names = ("file", "folder", "dangling", "loop", "shut", "shut_folder")
    return {
        **{name: str(bad / name) for name in names},
        "below_file": f"{bad}/file/below",
        "below_shut": f"{bad}/shut_folder/below",
        "missing": f"{bad}/missing/below",
        "long": f"{bad}/{'x' * 300}",
    }


BAD_FILES = ("file", "folder", "dangling", "loop", "shut", "shut_folder", "below_file", "below_shut", "missing", "long")


def act(argv: Sequence[str]) -> None:
    """Driver of a forked process: argv[0] is the folder to work in, argv[1] the program, the rest its command line."""
    os.setsid()
    os.chdir(argv[0])
    _limit()
    program, *words = argv[1:]
    if program.endswith(".sh"):
        os.execvp("bash", ["bash", str(ROOT / program), *words])
    _shorten(program)
    sys.argv = [str(ROOT / program), *words]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _make(root: Path, *argv: object) -> None:
    result = launch.run([root, *argv], root / "log", driver=DRIVER)
    assert result.codes == [0], result.text


def _limit() -> None:
    """No case can take the machine down, and root is refused what others would be."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    forks = [0]

    def count() -> None:
        forks[0] += 1
        if forks[0] > MOST_FORKS:
            os.write(2, b"forked too often\n")
            os._exit(97)

    os.register_at_fork(before=count)
    # Without CAP_DAC_OVERRIDE, permissions hold for root, too.
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0


def _shorten(program: str) -> None:
    """What a good command line would do for long is cut: one layout, a server that ends, a quickstart that says so."""
    if program == "tools/layout_parity.py":
        layouts.GRID, layouts.EXPERT_GRID = layouts.GRID[:1], layouts.EXPERT_GRID[:1]
        layout_parity.run_layout = _in_this_process
    elif program == "tools/plan.py":
        try_runs.try_layout = lambda flags, world_size: 0.5
    elif program == "tools/run_text_generation_server.py":
        uvicorn.Server.run = lambda self, sockets=None: None
    elif program == "tools/quickstart.py":
        os.chdir = lambda path: os._exit(96)


def _in_this_process(run, layout):
    run = layout_parity.under(run, layout)
    layout_parity.check(run, 1)
    groups, device = layout_parity.start_process(run.parallel, 0, 1, 0, 1)
    return layout_parity.assemble([layout_parity.measure(run, groups, device)])


def parser_of(program: str) -> FlagParser:
    """The parser of a tool."""
    return importlib.import_module(program.removesuffix(".py").replace("/", ".")).build_parser()


def _remove(root: Path, owner: int) -> None:
    if os.getpid() == owner:
        for folder, _, _ in os.walk(root):
            os.chmod(folder, 0o755)
        shutil.rmtree(root, ignore_errors=True)


torch.set_num_threads(1)

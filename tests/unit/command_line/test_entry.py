"""What becomes of a command line before torch is imported."""

import os
import subprocess
import sys

import pytest

from megatron.command_line.entry import run_of

SMALL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr "
    "1e-3 --data-path data"
)


# What a program does with its command line, and then: whether torch has been imported, and the allocator's variables.
PROGRAM = """
import os, sys
from megatron.command_line.entry import run_of
run_of(sys.argv[1:], "test")
names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
print("torch" in sys.modules, [os.environ[name] for name in names if name in os.environ])
"""


@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [
        ([], {}, "['expandable_segments:True']"),
        (["--device", "cpu"], {}, "[]"),
        ([], {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "['max_split_size_mb:64']"),
    ],
)
def test_the_allocator_is_chosen_before_torch_is_imported(flags, given, expected):
    """torch reads the variable while it is imported."""
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    words = [*SMALL.split(), "--tokenizer-type", "NullTokenizer", "--vocab-size", "8", *flags]
    command = [sys.executable, "-c", PROGRAM, *words]
    found = subprocess.run(command, env={**environment, **given}, capture_output=True, text=True, check=True).stdout
    assert found.strip() == f"False {expected}"


def test_the_files_of_gpt2_need_no_tokenizer_type(monkeypatch, capsys):
    files = ["--vocab-file", "vocab.json", "--merge-file", "merges.txt"]
    assert run_of([*SMALL.split(), *files], "test").tokenizer.tokenizer_type == "GPT2BPETokenizer"
    monkeypatch.setattr(os, "_exit", sys.exit)
    for words in ([], ["--tokenizer-model", "folder"], files[:2]):
        with pytest.raises(SystemExit) as ended:
            run_of([*SMALL.split(), *words], "test")
        assert ended.value.code == 2 and "--tokenizer-type is missing" in capsys.readouterr().err

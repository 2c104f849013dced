"""What becomes of a command line before torch is imported."""

import os
import sys

import pytest

from megatron.command_line.entry import run_of

SMALL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3 "
    "--data-path data"
)


def test_the_files_of_gpt2_need_no_tokenizer_type(monkeypatch, capsys):
    files = ["--vocab-file", "vocab.json", "--merge-file", "merges.txt"]
    assert run_of([*SMALL.split(), *files], "test").tokenizer.tokenizer_type == "GPT2BPETokenizer"
    monkeypatch.setattr(os, "_exit", sys.exit)
    for words in ([], ["--tokenizer-model", "folder"], files[:2]):
        with pytest.raises(SystemExit) as ended:
            run_of([*SMALL.split(), *words], "test")
        assert ended.value.code == 2 and "--tokenizer-type is missing" in capsys.readouterr().err

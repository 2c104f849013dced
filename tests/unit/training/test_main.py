"""What becomes of a command line before anything is built."""

import os
import sys

import pytest

from megatron.config.run import RunConfig
from megatron.training import main as module

SMALL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3 "
    "--data-path data"
)


@pytest.fixture
def run_of(monkeypatch):
    """The run that `main` would build from a command line, or the exit code it ends with."""
    seen = []
    monkeypatch.setattr(module, "pretrain", lambda run, *rest: seen.append(run))
    monkeypatch.setattr(module, "setup_logging", lambda rank: None)
    monkeypatch.setattr(os, "_exit", sys.exit)

    def call(*words):
        try:
            module.main([*SMALL.split(), *words], "test")
        except SystemExit as ended:
            return ended.code
        return seen.pop()

    return call


def test_the_files_of_gpt2_need_no_tokenizer_type(run_of, capsys):
    run = run_of("--vocab-file", "vocab.json", "--merge-file", "merges.txt")
    assert isinstance(run, RunConfig) and run.tokenizer.tokenizer_type == "GPT2BPETokenizer"
    for words in ([], ["--tokenizer-model", "folder"], ["--vocab-file", "vocab.json"]):
        assert run_of(*words) == 2
        assert "--tokenizer-type is missing" in capsys.readouterr().err

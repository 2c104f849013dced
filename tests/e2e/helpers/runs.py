"""The tiny runs of these tests: flags, data, and reading what a run left behind."""

import numpy as np
import torch

from megatron.base.box import Box
from megatron.core.datasets.indexed import IndexedDatasetWriter
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.core.dist_checkpointing.tensor_file import open_tensor_file
from megatron.training.logging.line import parse_evaluation, parse_line

VOCAB = 64
SEQ = 32

SHAPE = {
    "--num-layers": 2,
    "--hidden-size": 32,
    "--ffn-hidden-size": 64,
    "--num-attention-heads": 4,
    "--swiglu": None,
    "--normalization": "RMSNorm",
    "--position-embedding-type": "rope",
    "--disable-bias-linear": None,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
    "--vocab-size": VOCAB,
    "--make-vocab-size-divisible-by": 16,
}
TRAINING = {
    "--tokenizer-type": "NullTokenizer",
    "--seq-length": SEQ,
    "--micro-batch-size": 4,
    "--global-batch-size": 8,
    "--train-iters": 10,
    "--lr": 3e-3,
    "--log-interval": 1,
    "--eval-iters": 0,
    "--num-workers": 0,
    "--device": "cpu",
}
MOCK = {"--mock-data": None}


def flags(*changes, without=()):
    """argv of a tiny run; later dictionaries win. None as a value: the bare flag."""
    merged = {**SHAPE, **TRAINING}
    for change in changes:
        merged |= change
    argv = []
    for name, value in merged.items():
        if name not in without:
            values = value if isinstance(value, tuple | list) else () if value is None else (value,)
            argv += [name, *map(str, values)]
    return argv


def write_dataset(prefix, seed, documents=40, vocab=VOCAB):
    """Documents of 5 to 60 tokens, each ended by the end-of-document id."""
    random = np.random.RandomState(seed)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(documents):
            writer.add_document([*random.randint(0, vocab - 1, random.randint(5, 60)), vocab - 1])
        writer.finalize()
    return str(prefix)


def lines(stdout):
    """The log lines' fields, in order."""
    return [fields for fields in map(parse_line, stdout.splitlines()) if fields]


def figures(stdout):
    """Iteration -> the printed text of `lm loss` and `grad norm`."""
    found = {}
    for line in stdout.splitlines():
        if fields := parse_line(line):
            parts = [part.strip() for part in line.split("|")]
            found[int(fields["iteration"])] = [p for p in parts if p.startswith(("lm loss", "grad norm"))]
    return found


def evaluations(stdout):
    """(where, loss) of each evaluation, in order."""
    found = map(parse_evaluation, stdout.splitlines())
    return [(fields["where"], fields["lm loss"]) for fields in found if fields]


def checkpoint(folder):
    """(name -> global tensor, state) of the checkpoint in `folder`."""
    manifest = read_manifest(folder)
    tensors = {}
    for name, record in manifest.tensors.items():
        full = torch.empty(record.shape, dtype=record.dtype)
        for chunk in record.chunks:
            whole = Box((0,) * len(chunk.box.shape), chunk.box.shape)
            file = open_tensor_file(folder / chunk.file, manifest.files[chunk.file])
            place = tuple(slice(a, a + n) for a, n in zip(chunk.box.offset, chunk.box.shape))
            full[place] = file.read(chunk.key, chunk.dtype, chunk.box.shape, chunk.crc32, whole)
        tensors[name] = full
    return tensors, manifest.state

"""Where --batch-invariant-mode runs, and the trial that its kernels keep their promise on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.kernels.fused import numbers
from megatron.kernels.ops import norm
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.batch_invariant import activation, attention, cross_entropy, gemm
from megatron.spec.decoder import activation_of, attention_core

_TOKENS = 2 * gemm.ROWS + 3  # of a trial: two whole blocks and a part of one
_SOME = (1, 2, gemm.ROWS, gemm.ROWS + 1)  # of these, for the comparison

RowFunction = Callable[[Tensor], Tensor]  # of rows [n, w]


def check_device(device: torch.device) -> None:
    """Raises ConfigError where the kernels do not run."""
    if device.type == "cuda":
        raise ConfigError(
            "--batch-invariant-mode has kernels for CPUs only, because GPU libraries choose the order of a sum by the "
            "size of the batch; give --device cpu, or leave it out"
        )


def check_invariance(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError, naming the operation, if a row's result depends on the number or place of the rows.

    Each operation of the model is tried with its widths, on all of some rows and on a few of them.
    """
    for name, width, function in _row_functions(config, dtype, device):
        rows = numbers(device, dtype, _TOKENS, width)
        expected = function(rows)
        for count in _SOME:
            for start in (0, _TOKENS - count):
                if not torch.equal(function(rows[start : start + count].clone()), expected[start : start + count]):
                    raise _refusal(name)
    if not _attends_alike(config, dtype, device):
        raise _refusal("attention")


def _refusal(name: str) -> ConfigError:
    return ConfigError(
        f"--batch-invariant-mode cannot keep its promise here: {name} gave a token other bits in a smaller batch "
        f"(torch {torch.__version__}, {torch.get_num_threads()} threads); try another version of torch, or "
        "OMP_NUM_THREADS=1"
    )


def _row_functions(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, int, RowFunction]]:
    """Yields (name, width of a row, function) of the operations that see all tokens of a batch."""
    assert config.hidden_size
    hidden, inner, gated = config.hidden_size, config.ffn_dim, 1 + config.gated
    matrices = {(hidden, inner * gated), (inner, hidden), (hidden, hidden)}
    for columns, rows in sorted(matrices):
        weight = numbers(device, dtype, rows, columns, turns=1.1)
        yield f"a product of {columns} x {rows}", columns, partial(_product, weight)
    weight = torch.ones(hidden, dtype=dtype, device=device)
    yield "RMSNorm", hidden, lambda x: norm.compute_rms_norm(x, weight, 1e-5, norm.own)[0]
    yield "LayerNorm", hidden, lambda x: norm.compute_layer_norm(x, weight, weight, 1e-5)[0]
    name = activation_of(config)
    yield f"the activation {name}", inner * gated, activation.ACTIVATIONS[name]
    targets = torch.zeros(_TOKENS, dtype=torch.int64, device=device)
    size = config.padded_vocab_size if config.vocab_size else hidden
    yield "the loss", size, lambda x: cross_entropy.local_statistics(x, targets[: len(x)], 0).t()


def _product(weight: Tensor, x: Tensor) -> Tensor:
    return gemm.linear(x, weight)


def _attends_alike(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the last query of two packed documents gets what it gets alone, against a cache of keys."""
    core = attention_core(config, None)
    lengths = (attention.KEYS + 5, attention.QUERIES - 1)
    total = sum(lengths)
    q, k, v = (
        numbers(device, dtype, total, 1, heads, channels, turns=turns)
        for heads, channels, turns in (
            (core.heads, core.qk_dim, 0.7),
            (core.groups, core.qk_dim, 1.1),
            (core.groups, core.v_dim, 1.3),
        )
    )
    ids = torch.arange(2, device=device).repeat_interleave(torch.tensor(lengths, device=device)).unsqueeze(0)
    scores = Scores(core.scale, core.softcap)
    packed, _ = attention.forward(q, k, v, scores, ids, None)
    for stop, length in ((lengths[0], lengths[0]), (total, lengths[1])):
        document = slice(stop - length, stop)
        alone, _ = attention.forward(q[stop - 1 : stop], k[document], v[document], scores, None, None)
        if not torch.equal(alone[0], packed[stop - 1]):
            return False
    return True

"""The kernels of --batch-invariant-mode on a device, and the trial that they keep their promise there."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.base.errors import ConfigError, first_line
from megatron.config.model import ModelConfig
from megatron.kernels import fused
from megatron.kernels.fused import LayerKernels, numbers
from megatron.kernels.ops import attention_lse, norm
from megatron.kernels.ops.attention import AttentionKernel
from megatron.kernels.ops.attention_lse import BlockKernel
from megatron.kernels.ops.attention_rule import Rule
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments
from megatron.kernels.ops.batch_invariant import activation, attention, cross_entropy, gemm, routing
from megatron.kernels.ops.grouped_gemm import GroupedGemm
from megatron.kernels.ops.routing import RouterKernels
from megatron.kernels.ops.weight_grad import WeightGrad
from megatron.kernels.ops.xielu import compute_xielu
from megatron.spec.decoder import attention_core
from megatron.spec.mlp import activation_of

_TOKENS = 2 * gemm.ROWS + 3  # of a trial: two whole blocks and a part of one
_SOME = (1, 2, gemm.ROWS, gemm.ROWS + 1)  # of these, for the comparison

RowFunction = Callable[[Tensor], Tensor]  # of rows [n, w]


class InvariantKernels(NamedTuple):
    """Kernels that give a token the same bits in any batch. The choices are for the start-up table."""

    attention: AttentionKernel
    linear: gemm.InvariantLinear
    grouped: GroupedGemm
    router: RouterKernels
    fused: LayerKernels
    sigmoid: Callable[[Tensor], Tensor]
    attention_choice: str
    layers_choice: str


def choose_invariant(
    device: torch.device, layers: LayerKernels, router: RouterKernels, blocks: BlockKernel, weight_grad: WeightGrad
) -> InvariantKernels:
    """Returns the kernels. Those of layers and of the router that are independent of the batch anyway, and all
    gradients, are the given ones. Raises ConfigError for a GPU without Triton."""
    attention_choice = f"blocks of {attention.KEYS} keys (--batch-invariant-mode)"
    if device.type == "cuda":
        why = fused.missing(device)
        if why is not None:
            raise ConfigError(
                f"--batch-invariant-mode cannot run here: its kernels for GPUs are in Triton, and {why}; "
                "leave it out, or give --device cpu"
            )
        name = "megatron.kernels.backends.triton"
        products, of_keys = (
            importlib.import_module(f"{name}.{module}") for module in ("fixed_product", "fixed_attention")
        )
        linear = gemm.InvariantLinear(weight_grad, products.TileProduct)
        return InvariantKernels(
            attention.in_key_blocks(of_keys.forward, _of_documents(blocks)),
            linear,
            products.grouped,
            router._replace(logits=linear.output),
            layers,
            activation.sigmoid,
            attention_choice,
            f"tiles of {products.ROWS} rows (--batch-invariant-mode)",
        )
    linear = gemm.InvariantLinear(weight_grad, gemm.BlockProduct)
    return InvariantKernels(
        attention.in_key_blocks(attention.forward, blocks),
        linear,
        gemm.grouped,
        router._replace(logits=linear.output, route=routing.route),
        layers._replace(activations=activation.activations(layers.activations), cross_entropy=cross_entropy.KERNEL),
        activation.sigmoid,
        attention_choice,
        f"blocks of {gemm.ROWS} rows (--batch-invariant-mode)",
    )


def _of_documents(blocks: BlockKernel) -> BlockKernel:
    """Returns `blocks` with a backward for packed documents, which no kernel of blocks for GPUs has: in plain torch."""

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = blocks if rule.segments is None else attention_lse.by_rows
        return kernel.backward(grad, q, k, v, out, lse, rule)

    return blocks._replace(backward=backward)


def check_invariance(kernels: InvariantKernels, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError, naming the operation, if a row's result depends on the number or place of the rows.

    Each operation of the model is tried with its widths, on all of some rows and on a few of them. A dry run's tensors
    have no values to compare.
    """
    for name, width, function in _row_functions(kernels, config, dtype, device):
        rows = numbers(device, dtype, _TOKENS, width)
        try:
            if not fused.only_traced() and not _is_invariant(function, rows):
                raise _refusal(name)
        except RuntimeError as error:  # Triton's compiler, or the driver
            raise ConfigError(f"--batch-invariant-mode cannot run here: {name}: {first_line(error)}") from error
    if not fused.only_traced() and not _attends_alike(kernels.attention, config, dtype, device):
        raise _refusal("attention")


def _is_invariant(function: RowFunction, rows: Tensor) -> bool:
    expected = function(rows)
    for count in _SOME:
        for start in (0, len(rows) - count):
            if not torch.equal(function(rows[start : start + count].clone()), expected[start : start + count]):
                return False
    return True


def _refusal(name: str) -> ConfigError:
    return ConfigError(
        f"--batch-invariant-mode cannot keep its promise here: {name} gave a token other bits in a smaller batch "
        f"(torch {torch.__version__}, {torch.get_num_threads()} threads); try another version of torch, or "
        "OMP_NUM_THREADS=1"
    )


def _row_functions(
    kernels: InvariantKernels, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, int, RowFunction]]:
    """Yields (name, width of a row, function) of the operations that see all tokens of a batch."""
    assert config.hidden_size
    hidden, inner, gated = config.hidden_size, config.ffn_dim, 1 + config.gated
    matrices = {(hidden, inner * gated), (inner, hidden), (hidden, hidden)}
    for columns, rows in sorted(matrices):
        weight = numbers(device, dtype, rows, columns, turns=1.1)
        yield f"a product of {columns} x {rows}", columns, partial(_product, kernels.linear, weight)
    layers, weight = kernels.fused, torch.ones(hidden, dtype=dtype, device=device)
    yield "RMSNorm", hidden, lambda x: layers.norm.compute_rms_norm(x, weight, 1e-5, norm.own)[0]
    yield "LayerNorm", hidden, lambda x: layers.norm.compute_layer_norm(x, weight, weight, 1e-5)[0]
    name = activation_of(config)
    zero = torch.zeros(1, dtype=dtype, device=device)
    yield f"the activation {name}", inner * gated, layers.activations.get(name) or partial(_xielu, zero)
    targets = torch.zeros(_TOKENS, dtype=torch.int64, device=device)
    size = config.padded_vocab_size if config.vocab_size else hidden
    loss = layers.cross_entropy.local_statistics
    yield "the loss", size, lambda x: loss(x, targets[: len(x)], 0).t()
    yield "the loss of columns", size, lambda x: loss(x.t().contiguous().t(), targets[: len(x)], 0).t()


def _xielu(alpha: Tensor, x: Tensor) -> Tensor:
    return compute_xielu(x, alpha, alpha)


def _product(linear: gemm.InvariantLinear, weight: Tensor, x: Tensor) -> Tensor:
    return linear.output(x, weight)


def _attends_alike(kernel: AttentionKernel, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
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
    attend = partial(kernel, scores=Scores(core.scale, core.softcap), window=None, dropout=0.0)
    packed = attend(q, k, v, segments=Segments(ids))
    for stop, length in ((lengths[0], lengths[0]), (total, lengths[1])):
        document = slice(stop - length, stop)
        alone = attend(q[stop - 1 : stop], k[document], v[document], segments=None)
        if not torch.equal(alone[0], packed[stop - 1]):
            return False
    return True

"""Bytes of the tensors of one microbatch on one rank, from the run's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.context import attention_comm_types
from megatron.config.run import RunConfig
from megatron.planner.activations import Place

# Kinds of memory, in the order of tables.
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ATTENTION, MLP, NORMS, RESIDUAL, DROPOUT = "attention", "mlp", "norms", "residual", "dropout"
EMBEDDING, LOGITS, BATCH = "embedding", "logits", "batch"
BACKWARD, COMMUNICATION, WORK = "backward", "communication", "work space"
ACTIVATIONS = (ATTENTION, MLP, NORMS, RESIDUAL, DROPOUT, EMBEDDING, LOGITS, BATCH)
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, *ACTIVATIONS, BACKWARD, COMMUNICATION, WORK)

FP32, INT64, MASK = 4, 8, 1


@dataclass(frozen=True)
class Target:
    """Where a run will be: what of its kernels decides about memory.

    cpu: kernels of the CPU; else of a CUDA device. wide: products of half-precision matrices are taken on fp32 copies, as
    on CPUs without instructions for them (kernels/ops/gemm.py).
    """

    cpu: bool
    wide: bool = False


@dataclass(frozen=True)
class Sizes:
    """Elements, unless a name says otherwise. s, b: sequence and samples as a rank holds them; /tp where sharded."""

    target: Target
    tp: int
    sp: int  # parts that sequence parallelism cuts the sequence into: tp, or 1
    cp: int
    s: int
    b: int
    h: int
    f: int  # of the MLP's inner activation, /tp
    gated: bool
    heads: int  # queries, /tp
    groups: int  # keys and values, /tp
    d: int
    rotary: int  # channels of a head
    vocab: int  # padded, /tp
    e: int  # bytes of an activation
    r: int  # bytes of an element of the residual stream

    @property
    def tokens(self) -> int:
        """Of this rank's part of the microbatch."""
        return self.s * self.b

    @property
    def rows(self) -> int:
        """The same where sequence parallelism cuts it."""
        return self.tokens // self.sp

    @property
    def hidden(self) -> int:
        """Bytes of hidden states between the layers' linear parts."""
        return self.rows * self.h * self.e

    @property
    def whole(self) -> int:
        """Bytes of hidden states, gathered over sequence parallelism."""
        return self.tokens * self.h * self.e

    @property
    def residual(self) -> int:
        """Bytes of the residual stream."""
        return self.rows * self.h * self.r

    @property
    def queries(self) -> int:
        """Bytes of the queries of a layer, and of what its attention returns."""
        return self.tokens * self.heads * self.d * self.e

    @property
    def keys(self) -> int:
        """Bytes of the keys of a layer; values take as much."""
        return self.tokens * self.groups * self.d * self.e

    @property
    def inner(self) -> int:
        """Bytes of the MLP's inner activation."""
        return self.tokens * self.f * self.e

    @property
    def logits(self) -> int:
        """Bytes of the logits."""
        return self.tokens * self.vocab * self.e


def sizes_of(run: RunConfig, target: Target) -> Sizes:
    """Sizes of a valid run whose vocabulary is known."""
    model, parallel = run.model, run.parallel
    assert model.hidden_size and model.num_attention_heads and run.data.seq_length and run.train.micro_batch_size
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    sp = tp if parallel.sequence_parallel else 1
    step = 2 * cp * sp if cp > 1 else 1  # sequences are padded to a multiple of it
    e = FP32 if model.dtype_name == "float32" else 2
    return Sizes(
        target=target,
        tp=tp,
        sp=sp,
        cp=cp,
        s=-(-run.data.seq_length // step) * step // cp,
        b=run.train.micro_batch_size,
        h=model.hidden_size,
        f=model.ffn_dim // tp,
        gated=model.swiglu,
        heads=model.num_attention_heads // tp,
        groups=model.local_kv_heads(tp),
        d=model.head_dim,
        rotary=model.rotary_dim,
        vocab=model.padded_vocab_size // tp,
        e=e,
        r=FP32 if model.fp32_residual_connection else e,
    )


def place_of(run: RunConfig, sizes: Sizes) -> Place:
    """The same for the formulas of planner/activations.py."""
    cpu, wide = sizes.target.cpu, sizes.target.wide
    attention = "upcast" if wide else "fused"
    if run.model.attention_backend == "unfused":
        attention = "unfused"
    elif cpu and run.model.attention_dropout and (sizes.cp == 1 or comm_type(run) == "a2a"):
        attention = "math"
    return Place(sizes.s, sizes.b, sizes.tp, sizes.sp > 1, attention, "cpu" if cpu else "cuda")


def comm_type(run: RunConfig) -> str:
    """How the first layer's attention gets at the whole sequence; the largest decides, and they are about equal."""
    assert run.model.num_layers
    return attention_comm_types(run.parallel, run.model.num_layers)[0]

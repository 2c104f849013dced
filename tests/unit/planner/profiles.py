"""A made-up profile of a small model, whose times follow from a few numbers."""

from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.train import TrainConfig
from megatron.planner.time.profile_file import (
    BUCKET_ALL_REDUCE,
    BUCKET_GATHER,
    BUCKET_REDUCE_SCATTER,
    EMBEDDING,
    FORMAT,
    HEAD,
    SEND,
    AttentionRow,
    EndRow,
    LayerRow,
    MachineProfile,
    MessageRow,
    ProductRow,
    shape_of,
)
from megatron.spec.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SHIFT

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    vocab_size=1024,
    swiglu=True,
    add_bias_linear=False,
    normalization="RMSNorm",
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
)
S = 128
# The run of the made-up model on one rank, as typed.
_FLAGS = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 1024 --num-attention-heads 8 --vocab-size 1024 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --seq-length 128 --mock-data "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --train-iters 1 --lr 1 --device cpu "
    "--micro-batch-size 1 --global-batch-size 4"
)
RUN = _FLAGS.split()
RATE = 1e10  # FLOP/s of products and attention
LATENCY, BANDWIDTH = 1e-4, 1e8  # of messages
INTERFERENCE = 0.25
UPDATES, STEP = 1e8, 3e-3
# Seconds of forward, input gradient and weight gradient, of a layer with micro batch 1, the embedding and the head.
LAYER, EMBED, LOSS = (4e-3, 5e-3, 3e-3), (1e-4, 2e-4, 0.0), (2e-3, 1.5e-3, 1e-3)
AGAIN = {"core_attn": 1e-3, "norm": 2e-4, "mlp_act": 3e-4, "mlp": 1.5e-3, "full": 3.5e-3}


def run_of(micro_batch=1, model=MODEL, samples=4, recompute=None, **parallel):
    """The run of the made-up model in a layout."""
    changed = {} if recompute is None else {"recompute": recompute}
    return RunConfig(
        model=model,
        data=DataConfig(seq_length=S, mock_data=True),
        train=TrainConfig(micro_batch_size=micro_batch, global_batch_size=samples, train_iters=10),
        parallel=ParallelConfig(device="cpu", **parallel),
        **changed,
    )


def layer_row(times=1.0, **layout):
    """A layer that takes `times` as long as LAYER."""
    forward, input_grad, weight_grad = (times * each for each in LAYER)
    given = {
        "layer": 0,
        "tp": 1,
        "sequence_parallel": False,
        "tp_overlap": False,
        "cp": 1,
        "cp_kind": "p2p",
        "micro_batch": 1,
        "seq_length": S,
        "host_forward_seconds": 0.0,
        "host_backward_seconds": 0.0,
        "again_seconds": {name: times * seconds for name, seconds in AGAIN.items()},
        "spread": 0.01,
    }
    return LayerRow(
        forward_seconds=forward, input_grad_seconds=input_grad, weight_grad_seconds=weight_grad, **(given | layout)
    )


def end_row(end, seconds):
    """An end of the model with micro batch 1 on one rank."""
    return EndRow(
        end=end,
        tp=1,
        sequence_parallel=False,
        cp=1,
        micro_batch=1,
        seq_length=S,
        forward_seconds=seconds[0],
        input_grad_seconds=seconds[1],
        weight_grad_seconds=seconds[2],
        spread=0.01,
    )


def message_rows():
    """All operations between two and four ranks of one node, and between two nodes."""
    ops = (
        *(ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, SHIFT),
        *(BUCKET_GATHER, BUCKET_REDUCE_SCATTER, BUCKET_ALL_REDUCE, SEND),
    )
    return tuple(
        MessageRow(
            op=op,
            ranks=ranks,
            together=together,
            nbytes=nbytes,
            seconds=LATENCY + nbytes / BANDWIDTH * (1 if ranks == together else 10),
            interference=INTERFERENCE,
            spread=0.05,
        )
        for op in ops
        for ranks, together in ((2, 2), (4, 4), (2, 1))
        for nbytes in (1 << 12, 1 << 20)
    )


def profile_of(**changes):
    """The made-up profile."""
    products = tuple(
        ProductRow(m=m, n=n, k=k, accumulates=sums, seconds=2.0 * m * n * k / RATE, spread=0.02)
        for m, n, k in ((128, 768, 256), (128, 256, 1024), (256, 768, 256))
        for sums in (False, True)
    )
    attention = tuple(
        AttentionRow(
            micro_batch=1,
            tokens=tokens,
            heads=8,
            groups=8,
            head_dim=32,
            forward_seconds=2.0 * tokens**2 * 256 / RATE,
            backward_seconds=5.0 * tokens**2 * 256 / RATE,
            spread=0.02,
        )
        for tokens in (S // 2, S)
    )
    given = {
        "format": FORMAT,
        "project": "0.1.0",
        "torch": "2.13.0",
        "date": "2026-01-01T00:00:00+00:00",
        "device": "cpu",
        "dtype": MODEL.dtype_name,
        "world_size": 4,
        "devices_per_node": 2,
        "hosts": ("a", "b"),
        "threads": 1,
        "processors": 2,
        "memory_bytes": 1 << 33,
        "shape": shape_of(MODEL),
        "profile_seconds": 100.0,
        "left_out": (),
        "bytes_per_second": 1e10,
        "step_seconds": STEP,
        "update_parameters_per_second": UPDATES,
        "cpu_adam_parameters_per_second": 2e8,
        "to_host_bytes_per_second": 5e9,
        "to_device_bytes_per_second": 4e9,
        "layers": (layer_row(), layer_row(times=2.0, micro_batch=2)),
        "ends": (end_row(EMBEDDING, EMBED), end_row(HEAD, LOSS)),
        "products": products,
        "attention": attention,
        "messages": message_rows(),
    }
    return MachineProfile(**(given | changes))

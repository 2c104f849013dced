"""Small models, and runs of them, whose layouts and times the planner's tests compare."""

import dataclasses

from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import ScheduleConfig
from megatron.config.run import RunConfig
from megatron.config.train import TrainConfig

LLAMA = ModelConfig(
    num_layers=8,
    hidden_size=2048,
    ffn_hidden_size=5632,
    num_attention_heads=16,
    group_query_attention=True,
    num_query_groups=4,
    vocab_size=32000,
    swiglu=True,
    bf16=True,
    add_bias_linear=False,
    normalization="RMSNorm",
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
)
EXPERTS = dataclasses.replace(
    LLAMA, num_layers=4, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=2816, moe_layer_freq="([0]*1+[1]*3)"
)
# A run of LLAMA on 16 devices, as a command line.
LLAMA_FLAGS = (
    *("--num-layers", 8, "--hidden-size", 2048, "--ffn-hidden-size", 5632, "--num-attention-heads", 16),
    *("--group-query-attention", "--num-query-groups", 4, "--vocab-size", 32000, "--swiglu", "--bf16"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--seq-length", 4096, "--micro-batch-size", 1),
    *("--global-batch-size", 64, "--tensor-model-parallel-size", 2, "--sequence-parallel"),
    *("--pipeline-model-parallel-size", 2, "--use-distributed-optimizer", "--overlap-grad-reduce"),
    *("--overlap-param-gather", "--train-iters", 1, "--lr", "1e-4", "--mock-data"),
    *("--tokenizer-type", "NullTokenizer", "--device", "cuda"),
)


def run_of(model: ModelConfig, seq_length: int, global_batch_size: int) -> RunConfig:
    """Returns a run that a search lays out."""
    return RunConfig(
        model=model,
        data=DataConfig(seq_length=seq_length, mock_data=True),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer"),
        schedule=ScheduleConfig(lr=1e-4),
        train=TrainConfig(micro_batch_size=1, global_batch_size=global_batch_size, train_iters=10),
    )

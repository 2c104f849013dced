"""A command line with all that other Megatrons have trains as the equivalent command of tools/check_flags.py does."""

import shlex

import pytest

from tests.e2e.launch_lines import ITERATIONS, compare

LINE = """
    --num-layers 32 --hidden_size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings=8192 --rms-norm --layernorm-epsilon 1e-5 --swiglu --disable-bias-linear
    --use-rotary-position-embeddings --no-position-embedding --rotary-base 5e5 --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0 --use-mcore-models --transformer-impl transformer_engine --use-flash-attn
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 1e5 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine
    --lr-warmup-iters 2000 --initial-loss-scale 65536 --bf16 --attention-softmax-in-fp32 --no-masked-softmax-fusion
    --tensor-model-parallel-size 4 --sequence-parallel true --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --kaimm-gc-interval 50 --data-path 0.5 /data/a 0.5 /data/b --split "'99, 1, 0'"
    --vocab-file vocab.json --merge-file merges.txt --data-impl mmap --save /ckpt --save-interval 1000 --load /ckpt
    --ckpt-format torch_dist --async-save --dist-ckpt-strictness log_all --no-save-optim false --log-throughput
    --tensorboard-dir /logs --log-timers-to-tensorboard --moe-router-topk 2 --distributed-backend nccl
"""

EXPERTS = """
    --num-layers 28 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --seq-length 4096 --swiglu
    --position-embedding-type rope --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights
    --num-experts 64 --moe-layer-freq ([0]+[1]*27) --moe-ffn-hidden-size 1408 --n-shared-experts 1 --moe-router-topk 6
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --norm-topk-prob --routed-scaling-factor 2.5
    --moe-router-load-balancing-type seq_aux_loss --seq-aux --moe-aux-loss-coeff 1e-4 --moe-router-dtype fp32
    --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type flex --moe-enable-deepep --moe-layer-recompute
    --moe-shared-expert-overlap --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1 --micro-batch-size 1 --global-batch-size 512 --train-iters 1000 --lr 3e-4 --bf16
    --attention-dropout 0 --hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 100
"""


def test_what_changes_no_result_changes_no_result(tmp_path):
    given, read_as, world = compare(shlex.split(LINE), tmp_path)
    assert world == 4 and len(given) == ITERATIONS
    assert given == read_as


@pytest.mark.slow
def test_flags_about_experts(tmp_path):
    """Those of a fork, of kernels and of an older release are translated, or change nothing."""
    given, read_as, world = compare(shlex.split(EXPERTS), tmp_path)
    assert world == 4 and given == read_as

#!/usr/bin/env bash
# Pre-train a LLaMA. Settings are environment variables, all with a default; flags after the script's name come last and win.
#
#   MODEL=llama3.2-1b DATA=data/corpus_text_document TOKENIZER=path/to/folder SAVE=checkpoints/1b NPROC=8 TP=2 \
#       examples/llama/pretrain_llama.sh --train-samples 1000000 --lr-warmup-samples 10000
#
# Without DATA it trains on random tokens, to try a layout. Started again with the same SAVE it goes on from the newest
# checkpoint, also with another NPROC, NNODES or TP.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

MODEL=${MODEL:-llama3-8b}            # any --preset of docs/flags.md
DATA=${DATA:-}                       # prefix of .bin/.idx, or "weight prefix weight prefix ..."
TOKENIZER=${TOKENIZER:-}             # Hugging Face tokenizer folder; needed with DATA
SAVE=${SAVE:-}                       # folder of checkpoints; none are kept without it
SAVE_INTERVAL=${SAVE_INTERVAL:-1000} # steps
NPROC=${NPROC:-8}                    # processes on this node, one a GPU
TP=${TP:-1}                          # tensor parallelism; sequence parallelism comes with it
SEQ_LENGTH=${SEQ_LENGTH:-8192}
MICRO_BATCH=${MICRO_BATCH:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-512}    # samples in a step, over all replicas
LR=${LR:-3e-4}
PRECISION=${PRECISION---bf16}        # --fp16, or empty for fp32

# One node by itself. examples/slurm/pretrain.sbatch sets these for several.
NNODES=${NNODES:-1}
launcher=(--nproc-per-node "$NPROC")
if [ "$NNODES" -gt 1 ]; then
    launcher+=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID")
else
    launcher+=(--standalone)
fi

flags=(--preset "$MODEL" --seq-length "$SEQ_LENGTH" $PRECISION)
flags+=(--micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH")
flags+=(--lr "$LR" --lr-decay-style cosine --adam-beta2 0.95 --weight-decay 0.1)
flags+=(--tensor-model-parallel-size "$TP" --log-interval 10)
if [ "$TP" -gt 1 ]; then flags+=(--sequence-parallel); fi
if [ -n "$DATA" ]; then
    flags+=(--data-path $DATA --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
else
    flags+=(--mock-data --tokenizer-type NullTokenizer --vocab-size 32000)
fi
if [ -n "$SAVE" ]; then
    flags+=(--save "$SAVE" --load "$SAVE" --save-interval "$SAVE_INTERVAL" --save-retain 3)
fi

exec torchrun "${launcher[@]}" pretrain_gpt.py "${flags[@]}" "$@"

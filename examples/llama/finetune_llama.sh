#!/usr/bin/env bash
# Fine-tune a LLaMA on conversations. Settings are environment variables; flags after the script's name come last and win.
#
#   MODEL=llama3.2-1b PRETRAINED=checkpoints/1b DATA=data/chat TOKENIZER=path/to/folder SAVE=checkpoints/1b-chat \
#       NPROC=8 examples/llama/finetune_llama.sh --train-iters 1000
#
# DATA is what tools/preprocess_sft.py wrote. Started again with the same SAVE it goes on from the newest checkpoint there,
# also with another NPROC, NNODES or TP.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

MODEL=${MODEL:-llama3-8b}                  # any --preset of docs/flags.md; the shape of PRETRAINED
: "${PRETRAINED:?folder of checkpoints to start from}"
: "${DATA:?prefix of a dataset of tools/preprocess_sft.py, or \"weight prefix weight prefix ...\"}"
: "${TOKENIZER:?Hugging Face tokenizer folder}"
: "${SAVE:?folder to save checkpoints in}"
SAVE_INTERVAL=${SAVE_INTERVAL:-200}        # steps
NPROC=${NPROC:-8}                          # processes on this node, one a GPU
TP=${TP:-1}                                # tensor parallelism; sequence parallelism comes with it
SEQ_LENGTH=${SEQ_LENGTH:-4096}
MICRO_BATCH=${MICRO_BATCH:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-64}           # samples in a step, over all replicas; each holds as many conversations as fit
LR=${LR:-1e-5}
PRECISION=${PRECISION---bf16}              # --fp16, or empty for fp32

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
flags+=(--lr "$LR" --lr-decay-style cosine --lr-warmup-fraction 0.03 --adam-beta2 0.95)
flags+=(--tensor-model-parallel-size "$TP" --log-interval 10 --overlapped-distributed-optimizer)
if [ "$TP" -gt 1 ]; then flags+=(--sequence-parallel); fi
flags+=(--data-path $DATA --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
flags+=(--pretrained-checkpoint "$PRETRAINED" --load "$SAVE" --save "$SAVE" --save-interval "$SAVE_INTERVAL")

exec torchrun "${launcher[@]}" finetune.py "${flags[@]}" "$@"

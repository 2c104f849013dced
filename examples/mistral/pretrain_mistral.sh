#!/usr/bin/env bash
# Continue the pre-training of a Mistral 7B.
#
#   examples/mistral/pretrain_mistral.sh --model models/Mistral-7B-v0.1 --data data/corpus_text_document \
#       --save checkpoints/run --train-iters 10000 --tp 2
#
# v0.1 has a sliding window of 4096 tokens, which config.json brings; with --seq-length 4096 it hides nothing.
set -euo pipefail
program=pretrain_gpt.py lr=1e-5 lora_lr=2e-4 global_batch_size=256
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

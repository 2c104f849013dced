#!/usr/bin/env bash
# Continue the pre-training of a Qwen1.5, Qwen2, Qwen2.5 or Qwen3 (dense).
#
#   examples/qwen/pretrain_qwen.sh --model models/Qwen2.5-7B --data data/corpus_text_document \
#       --save checkpoints/run --train-iters 10000 --tp 2
#
# Qwen's tokenizer puts nothing before a text; <|endoftext|> ends a document, which base models have as their eos token.
set -euo pipefail
program=pretrain_gpt.py lr=1e-5 lora_lr=3e-4 global_batch_size=256
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

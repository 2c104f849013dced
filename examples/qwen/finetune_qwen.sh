#!/usr/bin/env bash
# Fine-tune a Qwen1.5, Qwen2, Qwen2.5 or Qwen3 (dense) on conversations.
#
#   examples/qwen/finetune_qwen.sh --model models/Qwen2.5-7B --data data/chat --save checkpoints/chat \
#       --train-iters 1000 --tp 2
#
# All of them, base models too, have a ChatML template. That of Qwen2 and Qwen2.5 adds a system text if there is none.
# Qwen3's writes earlier turns without their reasoning: for conversations of several turns give
# tools/preprocess_sft.py a template with {% generation %} marks. The learning rates are those of Qwen's own scripts.
set -euo pipefail
program=finetune.py lr=1e-5 lora_lr=3e-4 global_batch_size=64
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

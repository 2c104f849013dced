#!/usr/bin/env bash
# Fine-tune a Mistral 7B on conversations.
#
#   examples/mistral/finetune_mistral.sh --model models/Mistral-7B-v0.1 --tokenizer models/Mistral-7B-Instruct-v0.1 \
#       --data data/chat --save checkpoints/chat --train-iters 1000 --tp 2
#
# The Instruct models' templates want user and assistant in turn. Newer ones move the system's text to the last
# question, and tools/preprocess_sft.py refuses conversations that this changes; give it another template. The learning
# rates are those of Zephyr's recipe, with 2048 tokens (huggingface/alignment-handbook).
set -euo pipefail
program=finetune.py lr=2e-5 lora_lr=2e-4 global_batch_size=64
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

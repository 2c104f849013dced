#!/usr/bin/env bash
# Fine-tune a Llama 2 to 3.2, a Yi, or another model of that shape on conversations.
#
#   examples/llama/finetune_llama.sh --model models/Llama-3.1-8B-Instruct --data data/chat \
#       --save checkpoints/chat --train-iters 1000 --tp 2
#
# Base models have no chat template. Give tools/preprocess_sft.py --chat-template chatml or a template of your own, which
# then goes with the model. The learning rate is that of Llama 2 Chat, with batches
# of 64 and 4096 tokens (arXiv 2307.09288, 3.1); Yi's own scripts take 2e-6.
set -euo pipefail
program=finetune.py lr=2e-5 lora_lr=2e-4 global_batch_size=64
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

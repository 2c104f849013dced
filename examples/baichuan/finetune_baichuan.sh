#!/usr/bin/env bash
# Fine-tune a Baichuan-7B on conversations. Baichuan-13B and Baichuan 2 have parts that are not here, and are refused.
#
#   examples/baichuan/finetune_baichuan.sh --model models/Baichuan-7B --data data/chat --save checkpoints/chat \
#       --train-iters 1000 --tp 2 -- --trust-remote-code
#
# Its tokenizer is Python code in the model's folder: read it before you trust it. It has no chat template: give
# tools/preprocess_sft.py one.
set -euo pipefail
program=finetune.py lr=2e-5 lora_lr=2e-4 global_batch_size=64
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

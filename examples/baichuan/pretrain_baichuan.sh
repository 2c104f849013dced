#!/usr/bin/env bash
# Continue the pre-training of a Baichuan-7B. Baichuan-13B and Baichuan 2 have parts that are not here, and are refused.
#
#   examples/baichuan/pretrain_baichuan.sh --model models/Baichuan-7B --data data/corpus_text_document \
#       --save checkpoints/run --train-iters 10000 --tp 2 -- --trust-remote-code
#
# Its tokenizer is Python code in the model's folder: read it before you trust it. --save-hf writes it as a Llama.
set -euo pipefail
program=pretrain_gpt.py lr=1e-5 lora_lr=2e-4 global_batch_size=256
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

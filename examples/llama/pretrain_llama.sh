#!/usr/bin/env bash
# Continue the pre-training of a Llama 1 to 3.2, a Yi, or another model of that shape, or begin one.
#
#   examples/llama/pretrain_llama.sh --model models/Llama-3.1-8B --data data/corpus_text_document \
#       --save checkpoints/run --train-iters 10000 --tp 2
#   examples/llama/pretrain_llama.sh --preset llama3.2-1b --lr 3e-4 --tokenizer models/Llama-3.2-1B --data ...
#
# The learning rate of Llama 2 7B and 13B fell from 3e-4 to 3e-5 (arXiv 2307.09288, 2.2): the default goes on there.
set -euo pipefail
program=pretrain_gpt.py lr=3e-5 lora_lr=2e-4 global_batch_size=256
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

#!/usr/bin/env bash
# Pre-train a model with experts: Mixtral, Qwen1.5-MoE, Qwen2-MoE, Qwen3-MoE, OLMoE.
#
#   examples/moe/pretrain_moe.sh --preset qwen3-30b-a3b --lr 3e-4 --tokenizer models/Qwen3-30B-A3B \
#       --data data/corpus_text_document --save checkpoints/run --train-iters 10000 --ep 8
#
# A loss of coefficient 1e-3 balances the experts; --moe-aux-loss-coeff and other flags about experts may follow --.
# For thin experts, such as those of the Qwen models, --tp is best given with --etp 1.
set -euo pipefail
program=pretrain_gpt.py lr=1e-5 lora_lr=3e-4 global_batch_size=256
family_flags=(--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

"""Pre-train a GPT-family model: torchrun --nproc-per-node 8 pretrain_gpt.py --preset llama3-8b ..."""

import sys

from megatron.training.main import main

if __name__ == "__main__":
    main(sys.argv[1:], description="Pre-train a GPT-family model.")

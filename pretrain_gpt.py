"""Pre-train a GPT-family model: torchrun --nproc-per-node 8 pretrain_gpt.py --preset llama3-8b ..."""

import sys

from megatron.base.launch import block_exit_signals
from megatron.command_line.entry import run_of

if __name__ == "__main__":
    run = run_of(sys.argv[1:], description="Pre-train a GPT-family model.")
    block_exit_signals()
    # Imported here because torch takes seconds to import, and mistakes on the command line should show immediately.
    from megatron.training.main import main

    main(run)

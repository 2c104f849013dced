"""Fine-tune on instructions: torchrun --nproc-per-node 8 finetune.py --preset llama3-8b --data-path data/chat ...

This is pretrain_gpt.py with --sft: samples are whole conversations, and the assistant's turns are trained on. See
docs/sft.md.
"""

import sys

from megatron.base.launch import block_exit_signals
from megatron.command_line.entry import run_of

if __name__ == "__main__":
    run = run_of(["--sft", *sys.argv[1:]], description="Fine-tune a GPT-family model on instruction data.")
    block_exit_signals()
    # Imported here because torch takes seconds to import, and mistakes on the command line should show immediately.
    from megatron.training.main import main

    main(run)

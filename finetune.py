"""Fine-tune on instructions: torchrun --nproc-per-node 8 finetune.py --preset llama3-8b --data-path data/chat ...

The program of pretrain_gpt.py with --sft: samples are whole conversations, of which the assistant's turns are trained on.
See docs/sft.md.
"""

import sys

from megatron.command_line.entry import run_of

if __name__ == "__main__":
    run = run_of(["--sft", *sys.argv[1:]], description="Fine-tune a GPT-family model on instruction data.")
    # Only now, because torch takes seconds to import and a mistake on the command line is told at once.
    from megatron.training.main import main

    main(run)

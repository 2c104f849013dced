"""Learn from rewards: torchrun --nproc-per-node 8 train_rl.py --load-hf DIR --prompt-data FILE --rm-type number ...

The model answers prompts, a function rewards the answers, and the model learns to write those with higher rewards. This
is pretrain_gpt.py with --perform-rl-step and a sampler in place of data. See docs/rl.md. With --preference-data it
learns from pairs of answers instead, of which one is preferred. See docs/preferences.md.
"""

import sys

from megatron.base.launch import block_exit_signals
from megatron.command_line.entry import run_of

if __name__ == "__main__":
    run = run_of(
        ["--perform-rl-step", *sys.argv[1:]], description="Train a GPT-family model by rewards or preferences."
    )
    block_exit_signals()
    # Imported here because torch takes seconds to import, and mistakes on the command line should show immediately.
    from megatron.rl.main import main

    main(run)

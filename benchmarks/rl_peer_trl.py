"""GRPO by TRL's GRPOTrainer on the task of `make quickstart-rl`; benchmarks/rl_peer.py starts it.

Runs in an interpreter with torch and TRL. The last line of the output is JSON: the seconds and the mean reward of each
step. A step is what lies between the trainer's callbacks: answers, rewards, loss and update.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer


class Measure(TrainerCallback):
    """Measures the steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.started = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Starts the clock."""
        self.started = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Stops the clock."""
        self.seconds.append(time.perf_counter() - self.started)


def exact(completions: Sequence[str], label: Sequence[str], **others: Any) -> list[float]:
    """Rewards an answer that is its label."""
    return [float(text.strip() == right) for text, right in zip(completions, label)]


def main() -> None:
    """Trains and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model to start from")
    parser.add_argument("--task", required=True, help="folder with the tokenizer and the prompts")
    parser.add_argument("--output", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True, help="prompts of a step")
    parser.add_argument("--group", type=int, required=True, help="answers to a prompt")
    parser.add_argument("--longest", type=int, required=True, help="tokens of an answer")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(f"{args.task}/tokenizer")
    tokenizer.pad_token = "<|unused0|>"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    prompts = load_dataset("json", data_files=f"{args.task}/prompts.jsonl")["train"]
    measure = Measure()
    config = GRPOConfig(
        output_dir=args.output,
        use_cpu=True,
        bf16=False,
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=args.prompts * args.group,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        num_generations=args.group,
        max_completion_length=args.longest,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=args.warmup,
        weight_decay=0.0,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        dataloader_num_workers=0,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=config,
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[measure],
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({"seconds": measure.seconds, "rewards": rewards}))


if __name__ == "__main__":
    main()

"""GRPO by TRL's GRPOTrainer on the task of `make quickstart-rl`; benchmarks/rl_peer.py starts it.

Runs in an interpreter with torch and TRL. The last line of the output is JSON: the seconds of each step and the share of
exact answers by step. A step is what lies between the trainer's callbacks: answers, rewards, loss and update.
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
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

NAMES = ("prompts", "held_out")


class Measure(TrainerCallback):
    """Measures the steps, and answers the held-out prompts greedily between them."""

    def __init__(
        self,
        prompts: list[str],
        labels: list[str],
        tokenizer: PreTrainedTokenizerFast,
        *,
        interval: int,
        longest: int,
    ) -> None:
        self.encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        self.labels, self.tokenizer, self.interval, self.longest = labels, tokenizer, interval, longest
        self.seconds: list[float] = []
        self.exact: dict[int, float] = {}
        self.started = 0.0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel,
        **others: Any,
    ) -> None:
        """Evaluates the first weights."""
        self.evaluate(model, 0)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Starts the clock."""
        self.started = time.perf_counter()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel,
        **others: Any,
    ) -> None:
        """Stops the clock, and evaluates if it is time."""
        self.seconds.append(time.perf_counter() - self.started)
        if state.global_step % self.interval == 0:
            self.evaluate(model, state.global_step)

    @torch.no_grad()
    def evaluate(self, model: PreTrainedModel, step: int) -> None:
        """Stores the share of held-out prompts that are answered exactly."""
        model.eval()
        ids = model.generate(**self.encoded, max_new_tokens=self.longest, do_sample=False)
        model.train()
        texts = self.tokenizer.batch_decode(ids[:, self.encoded["input_ids"].shape[1] :], skip_special_tokens=True)
        self.exact[step] = sum(text.strip() == label for text, label in zip(texts, self.labels)) / len(texts)


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
    parser.add_argument("--interval", type=int, required=True, help="steps between evaluations")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(f"{args.task}/tokenizer")
    tokenizer.pad_token = "<|unused0|>"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    rows = {name: load_dataset("json", data_files=f"{args.task}/{name}.jsonl")["train"] for name in NAMES}
    held_out = rows["held_out"]
    measure = Measure(
        list(held_out["prompt"]), list(held_out["label"]), tokenizer, interval=args.interval, longest=args.longest
    )
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
        logging_steps=args.interval,
        save_strategy="no",
        report_to="none",
        dataloader_num_workers=0,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=config,
        train_dataset=rows["prompts"],
        processing_class=tokenizer,
        callbacks=[measure],
    )
    trainer.train()
    print(json.dumps({"seconds": measure.seconds, "exact": measure.exact}))


if __name__ == "__main__":
    main()

"""Writes the data of a task that a tiny model learns on a CPU: "3 1 4 =" is answered by the digits in reverse.

    python examples/rl/reversed_digits.py --output reversed

| file in the output folder | content |
|---|---|
| `tokenizer/` | one token per digit, for `--tokenizer-type HuggingFaceTokenizer` |
| `warm_up.jsonl` | conversations for tools/preprocess_sft.py: questions of prompts.jsonl with their answers |
| `prompts.jsonl` | {"prompt": "3 1 4 =", "label": "4 1 3"} per line, for reinforcement learning |
| `held_out.jsonl` | the same for questions that neither of the others has |

The files depend on the arguments alone. The tokenizer's chat template writes the texts of a conversation one after
another, so that a prompt has the same tokens as text and as a message.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['content'] + (eos_token if message['role'] == 'assistant' else ' ') }}"
    "{% endfor %}"
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    parser.add_argument("--digits", type=int, default=3, help="digits of a question; default 3")
    parser.add_argument("--prompts", type=int, default=800, help="questions for reinforcement learning; default 800")
    parser.add_argument("--held-out", type=int, default=200, help="questions that are not trained on; default 200")
    parser.add_argument("--warm-up", type=int, default=2048, help="answered questions for fine-tuning; default 2048")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    args = parser.parse_args(argv)
    count = args.prompts + args.held_out
    if args.digits < 1 or args.prompts < 1 or args.held_out < 0 or args.warm_up < 0:
        parser.error("--digits and --prompts are at least 1, --held-out and --warm-up at least 0")
    if count > 10**args.digits:
        parser.error(f"{count} different questions need more than --digits {args.digits}")
    rng = random.Random(args.seed)
    questions = [f"{number:0{args.digits}d}" for number in rng.sample(range(10**args.digits), count)]
    prompts, held_out = questions[: args.prompts], questions[args.prompts :]
    args.output.mkdir(parents=True, exist_ok=True)
    save_tokenizer(args.output / "tokenizer")
    write(args.output / "warm_up.jsonl", (conversation(rng.choice(prompts)) for _ in range(args.warm_up)))
    write(args.output / "prompts.jsonl", map(row, prompts))
    write(args.output / "held_out.jsonl", map(row, held_out))
    print(
        f"{args.warm_up} answered questions, {len(prompts)} prompts and {len(held_out)} held-out ones in {args.output}"
    )
    return 0


def row(question: str) -> dict[str, str]:
    """Returns the prompt and the label of a question."""
    return {"prompt": f"{' '.join(question)} =", "label": " ".join(reversed(question))}


def conversation(question: str) -> dict[str, object]:
    """Returns the question with its answer."""
    texts = row(question)
    turns = (("user", texts["prompt"]), ("assistant", texts["label"]))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with a token for each digit, "=" and the end of an answer, and four without a use, which
    make the vocabulary 16.
    """
    words = [END, *"0123456789", "=", *(f"<|unused{number}|>" for number in range(4))]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[-1]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes one JSON object per line."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

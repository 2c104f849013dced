"""Continue prompts with the model of a checkpoint, or of a Hugging Face folder. See docs/generation.md.

python tools/generate.py --load DIR --prompt "def f("
python tools/generate.py --load-hf models/Llama-3.2-1B --prompt "def f("
python tools/generate.py --load-hf models/Llama-3.2-1B-Instruct --chat
torchrun --nproc-per-node 2 tools/generate.py --load DIR --prompts-file prompts.txt
torchrun --nproc-per-node 4 tools/generate.py --load DIR --pipeline-model-parallel-size 2 --prompt "def f("
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from megatron.base.errors import ConfigError, DataError, UserError
from megatron.base.log import get_logger
from megatron.command_line.flag_parser import FlagParser, path_word, within
from megatron.config.interval import SEED, SIZE, SIZE_OR_NONE
from megatron.config.model import ModelConfig
from megatron.core.comm.collectives import barrier, gather_objects
from megatron.core.datasets.tokenizer import Tokenizer, beginning
from megatron.core.groups import Groups, disconnect
from megatron.core.inference.chat import open_template
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.generate import Completion, check_lengths, generate
from megatron.core.models.hf.side_files import stop_ids
from megatron.tooling.tool import (
    add_model_flags,
    check_stop_ids,
    check_text,
    end,
    open_model,
    read_model,
    run_tool,
)

DEFAULT_SEED, DEFAULT_NEW_TOKENS = 1234, 128
Continue = Callable[..., list[Completion]]  # `generate` with bound model, tokenizer, sampling and stops
log = get_logger(__name__)


def build_parser() -> FlagParser:
    """Returns a parser of the tool's flags; those of the tokenizer have the same names as in training."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_model_flags(parser)
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    add("--prompts-file", type=path_word, metavar="FILE", help="one prompt per line; blank lines are skipped")
    add(
        "--chat",
        action="store_true",
        help="prompts are turns of a user, in the form of the model's chat template; typed ones make one conversation",
    )
    add("--system", metavar="TEXT", help="with --chat, the text of the system's turn")
    add(
        "--max-new-tokens",
        type=within(int, SIZE),
        metavar="N",
        help="longest continuation (default 128, or less if the model's context is full)",
    )
    add("--temperature", type=float, default=1.0, metavar="X", help="0 takes the likeliest token (default 1)")
    add(
        "--top-k",
        type=within(int, SIZE_OR_NONE),
        default=0,
        metavar="N",
        help="draw from the N likeliest tokens only (default 0: from all)",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="draw from the likeliest tokens with total probability X",
    )
    add(
        "--seed",
        type=within(int, SEED),
        metavar="N",
        help=f"prompt i (from 0) draws with seed N + i (default {DEFAULT_SEED})",
    )
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add(
        "--stop-id", action="append", default=[], type=int, metavar="N", help="token that ends a continuation, like eod"
    )
    add("--add-bos", action="store_true", help="begin prompts with the tokenizer's bos, as many published models need")
    add(
        "--batch-size",
        type=within(int, SIZE),
        default=8,
        metavar="N",
        help="prompts continued at the same time (default 8)",
    )
    return parser


def run(args: argparse.Namespace) -> None:
    """Checks everything that needs no other process, loads, continues the prompts. Collective over the world."""
    prompts = read_prompts(args.prompt, args.prompts_file)
    check_values(args)
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    if sampling.greedy and args.seed is not None:
        raise ConfigError("--seed has no effect at --temperature 0 (greedy); remove it")
    saved, tokenizer = read_model(args)
    check_stop_ids(args.stop_id, tokenizer)
    chat = Chat(tokenizer, args.system) if args.chat else None
    encoded = [chat.ids(prompt) if chat else encode(prompt, tokenizer, args.add_bos) for prompt in prompts]
    new = new_tokens(args.max_new_tokens, encoded, saved.model)
    ends = [*args.stop_id, *stop_ids(saved.tokenizer, saved.base)]

    minutes = 10.0 if prompts else 24 * 60.0  # the other ranks wait while the user types
    model, build = open_model(saved, args, minutes)
    groups = build.groups
    continue_prompts = functools.partial(
        generate,
        model,
        build,
        tokenizer,
        sampling=sampling,
        stop_ids=ends,
        stop_strings=args.stop,
        shows_special=not args.chat,
    )
    seed = DEFAULT_SEED if args.seed is None else args.seed
    with groups.heartbeat.phase("generate"), output(groups.rank) as out:
        if len(prompts) > 1:
            write_lines(out, continue_prompts, prompts, encoded, new, seed, args.batch_size)
        elif prompts:
            write_stream(out, continue_prompts, "" if chat else prompts[0], encoded[0], new, seed)
        else:
            for number, prompt in enumerate(typed_prompts(groups)):
                try:
                    ids = chat.ids(prompt) if chat else encode(prompt, tokenizer, args.add_bos)
                    new = new_tokens(args.max_new_tokens, [ids], saved.model)
                    answer = write_stream(out, continue_prompts, "" if chat else prompt, ids, new, seed + number)
                    if chat:
                        chat.add(prompt, answer)
                except UserError as error:  # the next prompt may be valid
                    log.info("error: %s", error)
    barrier(groups.world)
    disconnect(groups.heartbeat)


def check_values(args: argparse.Namespace) -> None:
    """Raises ConfigError for an invalid value."""
    if "" in args.stop:
        raise ConfigError("--stop '' would end every continuation before it begins; give some text")
    if args.chat and args.add_bos:
        raise ConfigError("--add-bos has no effect with --chat, whose template writes its own; remove it")
    if args.system is not None and not args.chat:
        raise ConfigError("--system has no effect without --chat; add it")


def read_prompts(typed: list[str], file: str | None) -> list[str]:
    """Returns prompts of the command line, then those of the file; none means that they are typed in a terminal."""
    prompts = list(typed)
    if file is not None:
        try:
            with open(file, encoding="utf-8") as lines:
                file_prompts = [line.rstrip("\n") for line in lines if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--prompts-file {file} cannot be read: {error}; give a UTF-8 text file") from error
        if not file_prompts:
            raise DataError(f"--prompts-file {file} holds no prompt; write one a line")
        prompts += file_prompts
    if not prompts and not sys.stdin.isatty():
        raise ConfigError("there is no prompt; give --prompt or --prompts-file, or start this in a terminal")
    return prompts


def encode(prompt: str, tokenizer: Tokenizer, add_bos: bool) -> list[int]:
    """Returns token ids of a prompt. Raises ConfigError for one that is not text, and for --add-bos without a bos."""
    check_text("--prompt", prompt)
    return [*beginning(tokenizer, add_bos), *tokenizer.encode(prompt)]


def new_tokens(count: int | None, prompts: Sequence[Sequence[int]], model: ModelConfig) -> int:
    """Returns the limit for these prompts: as requested, or the default if there is room. Raises ConfigError."""
    lengths = [len(ids) for ids in prompts]
    if count is None:
        limit = model.max_position_embeddings
        room = DEFAULT_NEW_TOKENS if limit is None else limit - max(lengths, default=0)
        count = max(1, min(DEFAULT_NEW_TOKENS, room))
    check_lengths(lengths, count, model)
    return count


class Chat:
    """A conversation in the form of the tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer, system: str | None) -> None:
        """system: the text of its turn, which is the first. Raises ConfigError if there is no template."""
        template = open_template(tokenizer)
        if template is None:
            raise ConfigError("--chat needs a chat template, and the model's tokenizer has none; remove it")
        self._template, self._tokenizer = template, tokenizer
        self._turns = [] if system is None else [{"role": "system", "content": system}]
        if system is not None:
            check_text("--system", system)

    def ids(self, text: str) -> list[int]:
        """Returns the tokens up to the answer to the next turn of the user. Raises UserError."""
        check_text("--prompt", text)
        return self._tokenizer.encode(self._template.render([*self._turns, {"role": "user", "content": text}]))

    def add(self, text: str, answer: str) -> None:
        """Adds a turn of the user, and the answer."""
        self._turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def write_stream(out: TextIO, continue_prompts: Continue, prompt: str, ids: list[int], new: int, seed: int) -> str:
    """Writes the prompt and, as it is generated, its continuation, which it returns."""

    def write(text: str) -> None:
        out.write(text)
        out.flush()

    started = time.perf_counter()
    write(prompt)
    (completion,) = continue_prompts([ids], max_new_tokens=new, seeds=[seed], on_text=lambda _, piece: write(piece))
    write("\n")
    report(len(completion.ids), time.perf_counter() - started)
    return completion.text


def write_lines(
    out: TextIO,
    continue_prompts: Continue,
    prompts: list[str],
    encoded: list[list[int]],
    new: int,
    seed: int,
    batch_size: int,
) -> None:
    """Writes one line of JSON per prompt, in order, as soon as it and all before it are complete."""
    started, written = time.perf_counter(), 0
    ended: dict[int, Completion] = {}

    def write(index: int, completion: Completion) -> None:
        nonlocal written
        ended[index] = completion
        while (finished := ended.pop(written, None)) is not None:
            tokens = len(finished.ids)
            line = {"prompt": prompts[written], "text": finished.text, "reason": finished.reason, "tokens": tokens}
            out.write(json.dumps(line, ensure_ascii=not is_unicode(out)) + "\n")
            out.flush()
            written += 1

    seeds = [seed + i for i in range(len(prompts))]
    completions = continue_prompts(encoded, max_new_tokens=new, seeds=seeds, batch_size=batch_size, on_end=write)
    report(sum(len(completion.ids) for completion in completions), time.perf_counter() - started)


def typed_prompts(groups: Groups) -> Iterator[str]:
    """Yields lines typed on the first rank, until its input ends. Communication: each line from it to all."""
    while True:
        line = ""
        if groups.rank == 0:
            print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        line = gather_objects(line, groups.world)[0]
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def is_unicode(out: TextIO) -> bool:
    """Whether every character can be written as it is."""
    return (out.encoding or "").lower().replace("-", "").startswith("utf")


@contextlib.contextmanager
def output(rank: int) -> Iterator[TextIO]:
    """Yields stdout on the first rank; the others, which compute the same text, discard it."""
    if rank == 0:
        yield sys.stdout
    else:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            yield nowhere


def report(tokens: int, seconds: float) -> None:
    """Logs the speed, including prompts, on the first rank's stderr."""
    log.info("%d tokens in %.2f s: %.1f tokens/s", tokens, seconds, tokens / seconds)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, see run_tool."""
    return run_tool(build_parser(), run, argv)


if __name__ == "__main__":
    if code := main(sys.argv[1:]):
        end(code)

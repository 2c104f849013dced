"""Bad input: a command line that works, changed in one to three places, either works still or is refused in plain
lines.

python -m tests.fuzz.bad_input --seed 1 --cases 1000

Every program of the tree takes part, each case in a process that is forked warm. A case passes with exit code 0, or
with exit code 2, a line that begins with "error: " for each mistake and nothing new on disk. A traceback, any other
exit code, a process that is left over, many forks, too much memory and standing still fail it.
"""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.command_line.flag_parser import build_parser
from tests.e2e.helpers import launch
from tests.fuzz import planner_files, programs
from tests.fuzz.campaign import Campaign, Failure, main
from tests.fuzz.programs import BAD_FILES, DRIVER, PROGRAMS, bad_files, good_files

SECONDS, SECONDS_AFTER_A_STEP = 90.0, 4.0  # a good case takes less than two on an idle machine
WHOLE = ("0", "-1", "-2", "1", "3", "30", "999999", "1000000000", "1000000000000", str(2**63 - 1), "1" + "0" * 40)
NUMBERS = ("nan", "inf", "-inf", "1e400", "1e-400", "1e300", "0.5", "-0.0", "", " ", "none", "0x10", "1,2", "\u0663")
TEXTS = (
    "",
    " ",
    "none",
    "\u00e9\u4e16\U0001f600",
    "\udcff\udc80",
    "a\nb",
    "--",
    "-",
    "0",
    "a" * 5000,
    "%s%n{}",
    "/",
    ".",
)
WEIGHTS = {"pretrain_gpt.py": 24, "tools/quickstart.py": 1, "tools/merge_datasets.py": 2}
WEIGHTS |= {"tools/run_text_generation_server.py": 3, "tools/plan.py": 12}  # others 4
KEPT = ("kept.json", "kept.html", "kept.csv", "kept.png")  # files that a case may write over, but not if it is refused
_NO_NUMBER = re.compile(r"(?i)[^\n]{0,40}(?<![\w'-])-?(nan|inf|infinity)(?!\w)[^\n]{0,20}")
STRAYS = ("--bogus", "--bogus=1", "stray", "--", "-x", "", "\udcff", "--help-me", "-1", "@file", "--train-iter", "---")
# Words of flags that have a grammar of their own.
WORDS = {
    "--space": ("tp=0", "tp=", "tp", "=1", "tp=1,", "tp=1 tp=2", "tp=999999", "tp=3", "recompute=full:0", "offload=nan",
                "recompute=full/99", "schedule=x", "cp_kind=p2p", "ep=2", "micro_batch=4", "tp=\u0663", "dp=1", "pp=2"),
    "--compare": ("'", "--help", "--bogus", "-1", "--num-layers 0", "--micro-batch-size 0", "--load-hf {hf}", "--device",
                  "--hidden-size 64", "--global-batch-size 8", "--expert-model-parallel-size 2", "--vocab-size 9", "\0"),
    "--cluster": ("h100", "h100:1x2", "h100:0x8", "h100:1x" + "9" * 5000, "h100:999999999x9999999", "a100:1x0", "h1000:1x8",
                  "h100:2x1", "gb200", "H100", "h100:", "h100:1x8x2", "mi300x:1x1", "{file}.toml"),
}  # fmt: skip


@dataclass(frozen=True)
class Option:
    """A flag as its parser knows it. kind: "switch", "whole", "number", "path" or "text"."""

    flag: str
    kind: str
    choices: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Change:
    """drop: the flag and its values go. set: they are replaced, or added at the end. add: words at the end."""

    how: str
    flag: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A program, which of its good command lines, and what is changed in it."""

    program: str
    line: int
    changes: tuple[Change, ...]


def draw(rng: random.Random) -> Case:
    """Training programs, which have most flags, come more often."""
    program = rng.choices([*PROGRAMS], [WEIGHTS.get(name, 4) for name in PROGRAMS])[0]
    line = rng.randrange(len(PROGRAMS[program]))
    changes = tuple(_draw_change(rng, program, line) for _ in range(rng.choice((1, 1, 1, 2, 2, 3))))
    return Case(program, line, changes)


def _draw_change(rng: random.Random, program: str, line: int) -> Change:
    words = PROGRAMS[program][line]
    present = {word: value for word, value in zip(words, (*words, "")[1:]) if word.startswith("--") and word != "--"}
    options = {option.flag: option for option in _options(program, line)}
    kind = rng.random()
    if not options:
        return Change("add", "", (rng.choice(STRAYS[:3]),))  # without flags it would work, for minutes
    if kind < 0.05:
        return Change("add", "", (rng.choice(STRAYS),))
    if kind < 0.12 and present:
        return Change("drop", rng.choice(list(present)))
    known = [flag for flag in present if flag in options]
    flag = rng.choice(known) if known and rng.random() < 0.5 else rng.choice(list(options))
    option = options[flag]
    count = option.count if rng.random() < 0.9 else rng.randrange(4)
    value = present.get(flag, "")
    return Change("add" if kind < 0.2 else "set", flag, tuple(_draw_word(rng, option, value) for _ in range(count)))


def _draw_word(rng: random.Random, option: Option, value: str) -> str:
    if rng.random() < 0.1:
        return rng.choice((*TEXTS, *NUMBERS))
    if option.flag in WORDS and rng.random() < 0.7:
        return rng.choice(WORDS[option.flag])
    if value.strip("{}") in planner_files.KINDS and rng.random() < 0.7:
        return f"{{{value.strip('{}')}_{rng.randrange(planner_files.MOST)}}}"
    if option.choices:
        return rng.choice((*option.choices, *TEXTS[:4]))
    if option.kind == "whole":
        return rng.choice(WHOLE)
    if option.kind == "number":
        return rng.choice((*WHOLE, *NUMBERS[:8]))
    if option.kind == "text":
        return rng.choice((*TEXTS, *WHOLE))
    like = [name for name in good_files() if name.partition("_")[0] == value.strip("{}")]
    name = rng.choice((rng.choice(list(good_files())), rng.choice(BAD_FILES), *(rng.choice(like) for _ in like[:2])))
    return f"{{{name}}}"


@functools.cache
def _options(program: str, line: int) -> tuple[Option, ...]:
    parsers = []
    if program in ("pretrain_gpt.py", "finetune.py", "tools/layout_parity.py", "tools/profile_machine.py"):
        parsers.append(build_parser(""))
    if program == "tools/plan.py":
        command = PROGRAMS[program][line][0]
        commands = next(action for action in programs.parser_of(program)._actions if action.choices).choices
        parsers += [commands[command], *([build_parser("")] if command in ("memory", "time", "search") else [])]
    elif program == "tools/profile_machine.py":
        parsers.insert(0, programs.parser_of(program))
    elif program.endswith(".sh"):
        names = [
            "model",
            "checkpoint",
            "preset",
            "data",
            "tokenizer",
            "save",
            "save-hf",
            "precision",
            "nodes",
            "master",
        ]
        counts = [
            "tp",
            "gpus",
            "train-iters",
            "seq-length",
            "micro-batch-size",
            "global-batch-size",
            "lr",
            "lora-rank",
            "save-interval",
        ]
        return tuple(Option(f"--{name}", "whole" if name in counts else "path", (), 1) for name in [*names, *counts])
    elif program == "tools/quickstart.py":
        return ()
    elif not parsers:
        parsers.append(programs.parser_of(program))
    found = []
    for action in (action for parser in parsers for action in parser._actions):
        if action.option_strings and action.dest != "help":
            kind = "switch" if action.nargs == 0 else _kind(action.dest, str(action.metavar))
            count = 0 if action.nargs == 0 else action.nargs if isinstance(action.nargs, int) else 1
            found.append(Option(action.option_strings[0], kind, tuple(map(str, action.choices or ())), count))
    return tuple(found)


def _kind(name: str, metavar: str) -> str:
    if metavar in ("N", "X"):
        return "whole" if metavar == "N" else "number"
    if metavar in ("DIR", "FILE", "PATH", "PREFIX", "PNG", "NAME|FILE", "MEAN|FILE"):
        return "path"
    return "path" if re.search("path|dir$|file$|save|load|_model$|curve|timeline|checkpoint$", name) else "text"


def command_line(case: Case) -> list[str]:
    """The words, files still by name."""
    groups: list[list[str]] = [[]]
    for word in PROGRAMS[case.program][case.line]:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    for change in case.changes:
        here = [i for i, group in enumerate(groups) if group[:1] == [change.flag]]
        if change.how == "drop":
            groups = [group for group in groups if group[:1] != [change.flag]]
        elif change.how == "set" and here:
            groups[here[0]] = [change.flag, *change.words]
        else:
            groups.append([*([change.flag] if change.flag else []), *change.words])
    return [word for group in groups for word in group]


def check(case: Case, folder: Path) -> str:
    """Run it; "works" or "refused". Raises Failure."""
    named = {**good_files(), **bad_files(folder), "out": str(folder / "out")}
    (folder / "out").mkdir()
    for name in KEPT:
        (folder / "out" / name).write_text("an earlier result")
    line = command_line(case)
    named |= planner_files.write_named(folder, line)
    words = [re.sub(r"\{(\w+)\}", lambda match: named.get(match[1], match[0]), word) for word in line]
    before = _listing(folder)
    job = launch.start([folder / "out", case.program, *words], folder / "log", driver=DRIVER)
    word = _wait(job)
    text = job.text() + job.text(kind="err")
    code = job.codes[0]
    left = _left_over(job.pids[0])
    if "Traceback" in text or "Logging error" in text:
        raise Failure(f"traceback: {_tail(text)}")
    if left:
        raise Failure(f"left over: processes {left}")
    if word:
        return word
    # What align.py and layout_parity.py are there to say, and how a run ends that a learning rate of 1e40 has spoilt.
    if code == 0 and case.program == "tools/plan.py" and not _NO_NUMBER.search(" ".join(words)):
        _check_figures(folder, text)
    if code == 0 or (code == 1 and ("differ by more than" in text or "is not finite. It was not saved" in text)):
        return "works"
    if code != 2:
        raise Failure(f"exit code {code}: {_tail(text)}")
    lines = job.text(kind="err").splitlines()
    prefix = f"{Path(case.program).name}: " if case.program.endswith(".sh") else "error: "
    said = [line for line in lines if line.startswith(prefix)]
    if not said or lines[-len(said) :] != said or len(said) != len(set(said)):
        raise Failure(f"no lines, each told once, that explain: {_tail(text)}")
    new = sorted(set(_listing(folder)) ^ set(before))
    if new:
        raise Failure(f"refused, but written: {new[:5]}; {lines[-1][:200]}")
    return "refused"


def _check_figures(folder: Path, text: str) -> None:
    """A plan has no figure that is no number."""
    made = [path.read_text() for path in (folder / "out").glob("kept.*") if path.suffix in (".json", ".csv")]
    if found := _NO_NUMBER.search("\n".join([text, *made])):
        raise Failure(f"a figure is no number: {found[0]}")


def _wait(job: launch.Job) -> str:
    """Until it ends: "". A run that still trains or evaluates some seconds after its first step is ended, and
    "works"."""
    started, first = time.monotonic(), None
    while not job.ended():
        now = time.monotonic()
        if first is None and "] iteration " in job.text():
            first = now
        if first is not None and now - first > SECONDS_AFTER_A_STEP:
            job.kill()
            return "works"
        if now - started > SECONDS:
            job.kill()
            raise Failure(f"did nothing for {SECONDS:.0f} s: {_tail(job.text() + job.text(kind='err'))}")
        time.sleep(0.02)
    return ""


def _left_over(session: int) -> list[str]:
    """Processes of the session that outlive it; workers notice the end of their parent after some seconds."""
    deadline = time.monotonic() + SECONDS
    while True:
        left = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[3]) == session and fields[0] != "Z":
                    left.append(entry)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    return left


def _listing(folder: Path) -> list[tuple[str, int]]:
    """Name and size of everything but the case's own log, and whole entries of an index cache, which the next run
    reads."""
    found = []
    for parent, folders, files in os.walk(folder):
        found += [(os.path.join(parent, name), -1) for name in folders]
        found += [(os.path.join(parent, name), os.lstat(os.path.join(parent, name)).st_size) for name in files]
    return [entry for entry in found if not entry[0].startswith((f"{folder}/log", f"{folder}/out/cache"))]


def _tail(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-6:])[-900:]


def simpler(case: Case) -> Iterable[Case]:
    """One change less."""
    for i in range(len(case.changes)) if len(case.changes) > 1 else ():
        yield replace(case, changes=case.changes[:i] + case.changes[i + 1 :])


def command(case: Case) -> str:
    """The words with names for the files."""
    return f"python {case.program} {' '.join(map(repr, command_line(case)))}"


CAMPAIGN = Campaign("bad_input", draw, check, simpler, command)

if __name__ == "__main__":
    main(CAMPAIGN)
